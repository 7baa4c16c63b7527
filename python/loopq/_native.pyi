"""The compiled core of loopq: Hessians, factors, quantizers and packing on plain arrays.

Everything here takes and gives NumPy arrays, releases the interpreter, answers Ctrl-C, and gives the same bits for
any ``threads`` and ``block_size``. ``threads = 0`` means all that the process may use.

Arrays may lie in memory in any order and with any strides: what is not in C order and aligned is copied first. Another
type than the one stated, or another number of dimensions, is a ``TypeError``; no type is converted. Where memory runs
out, ``loopq.errors.OutOfMemoryError`` says for what and how much was asked.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BEAM_COLUMNS",
    "BEAM_STRIP",
    "BLOCK_ROWS",
    "BLOCK_SIZE",
    "HESSIAN_VERSION",
    "LANES",
    "PIVOTS",
    "ROW_LIMIT",
    "SETTLED",
    "SHRINK_STEPS",
    "TOGETHER",
    "TURNS",
    "CpuLayout",
    "CpuRunner",
    "DampedFactor",
    "GptqCdSettings",
    "Grid",
    "HessianAccumulator",
    "__version__",
    "count_above",
    "coupled",
    "cpu_engines",
    "cpu_features",
    "cpu_read",
    "dequantize",
    "eigvalsh",
    "fit_levels",
    "gptq",
    "gptq_cd",
    "kernel_sources",
    "marlin_pack",
    "marlin_unpack",
    "pack_dense",
    "proxy",
    "rtn",
    "trellis",
    "unpack_dense",
    "w4_pack",
    "w4_unpack",
]

__version__: str

#: Rows in a block: products are summed in float32 before they reach the exact grid (docs/formats/hessian.md).
BLOCK_ROWS: int
HESSIAN_VERSION: int
ROW_LIMIT: float

# Constants of the solvers, for their twins in torch.
#: Columns of a block of the search with several paths, and of a strip of it.
BEAM_COLUMNS: int
BEAM_STRIP: int
#: Columns of GPTQ between two long updates, by default.
BLOCK_SIZE: int
#: Rows of a tile, and rows of a block that are descended together.
LANES: int
TOGETHER: int
#: Pivots of the conditional order that are found before their rows are subtracted.
PIVOTS: int
#: Relative gain below which a row is done, and the most turns of its descents.
SETTLED: float
TURNS: int
#: Scales that the search `mse` tries.
SHRINK_STEPS: int

_Precision = Literal["float64", "float32"]
_Order = Literal["natural", "diagonal", "conditional"]

class _State(TypedDict):
    spec_version: int
    dim: int
    steps: list[int]
    per_step: bool
    n_rows: list[int]
    hi: list[NDArray[np.int64]]
    lo: list[NDArray[np.int64]]

def kernel_sources() -> dict[str, str]:
    """Text of every CUDA source that the extension was built with, by file name."""

def cpu_features() -> list[str]:
    """Name the instruction sets that this machine runs; the last one is in use.

    Returns
    -------
    list of str
        Out of ``'portable'``, ``'avx2+fma'``, ``'avx512'``, ``'avx512+bf16'``, ``'avx512+amx'``, ``'neon'``.
    """

@final
class HessianAccumulator:
    """``H_t = X_t^T X_t`` summed over rows, per loop step, reproducibly.

    The rows of one step form one sequence in the order in which they come. Blocks have 512 rows, counted
    from the step's first row across calls. Products are summed in float32 within a block, and exactly between blocks,
    on a fixed grid of ``2^-60``. So threads, chunking, shards and merging cannot change a bit. The sum of ``H_t`` over
    ``t`` is ``H`` exactly. The spec is ``docs/formats/hessian.md``.

    Parameters
    ----------
    dim : int
        Columns of a row.
    steps : sequence of int
        The loop steps that will come, ascending, each once.
    per_step : bool
        Keep one Hessian per step (about ``8 * dim**2`` bytes each) or only their sum.
    threads : int
        Number of threads; 0 for all.

    Raises
    ------
    loopq.errors.ConfigError
        `dim`, `steps` or `threads` outside what is allowed.
    loopq.errors.OutOfMemoryError
        No memory for the sums.

    Notes
    -----
    The same bits on every processor, at any number of threads (docs/formats/hessian.md).
    """

    def __new__(
        cls, dim: int, steps: Sequence[int], *, per_step: bool, threads: int = 0
    ) -> HessianAccumulator: ...
    @property
    def dim(self) -> int:
        """Columns of a row."""
    @property
    def steps(self) -> list[int]:
        """The loop steps, ascending."""
    @property
    def per_step(self) -> bool:
        """Whether there is one Hessian per step."""
    def update(self, step: int, rows: NDArray[Any]) -> None:
        """Add rows to a step. A refused call changes nothing.

        Parameters
        ----------
        step : int
            One of `steps`.
        rows : ndarray of float32, float16 or uint16, shape (n, dim)
            uint16 holds bfloat16 bits. One accumulator takes one type.

        Raises
        ------
        loopq.errors.NonFiniteError
            NaN or infinity, named by step, row (counted from the step's first row) and column.
        loopq.errors.SolveError
            Magnitudes above ``2^27``, or a sum that would pass ``2^64``.
        loopq.errors.ConfigError
            An unknown step, another width or type, or an update after `finish`.
        """
    def update_file(self, step: int, path: str | PathLike[str], tensor: str) -> None:
        """Add rows that lie in a safetensors file, memory-mapped: the tensor is never held in memory as a whole.

        Parameters
        ----------
        step : int
            One of `steps`.
        path : path-like
            The file; it must not be written to meanwhile. Its header is checked as a whole.
        tensor : str
            Name of a tensor of type BF16, F16 or F32 and shape (n, dim).

        Raises
        ------
        loopq.errors.DumpError
            The file cannot be read or is no whole safetensors file, has no such tensor, or one of another type or
            shape.
        loopq.errors.NonFiniteError, loopq.errors.SolveError, loopq.errors.ConfigError
            As in `update`, with file and tensor.
        """
    def n_rows(self, step: int) -> int:
        """Count the rows that were added to a step."""
    def finish(self) -> None:
        """Add what waits for its block to fill; no update is taken afterwards. Further calls do nothing."""
    def matrix(
        self,
        steps: Sequence[int] | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> NDArray[np.float64]:
        """Give the full symmetric Hessian, summed over steps and rounded once to float64.

        Parameters
        ----------
        steps : sequence of int, optional
            Which steps; all by default. With ``per_step=False`` only all of them.
        weights : sequence of float, optional
            One per step, 0 or more: each ``H_t`` is rounded to float64, multiplied, and added in ascending order of
            steps. Without weights the sum over steps is exact.

        Returns
        -------
        ndarray, shape (dim, dim)

        Raises
        ------
        loopq.errors.ConfigError
            Not finished, unknown steps, or steps asked of a Hessian that only holds the sum.
        """
    def diagonal(self, steps: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Give the diagonal of the Hessian summed over steps, shape (dim,)."""
    def trace(self, step: int | None = None) -> float:
        """Give ``tr H_t`` of one step, or of the sum over all steps."""
    def merge(self, other: HessianAccumulator) -> None:
        """Add another finished accumulator: any order and any grouping of merges give the same bits.

        Raises
        ------
        loopq.errors.ConfigError
            Widths, steps or `per_step` differ, one of the two is not finished, or both are the same object.
        """
    def state(self) -> _State:
        """Give the exact state.

        Returns
        -------
        dict
            ``spec_version``, ``dim``, ``steps``, ``per_step``, ``n_rows`` (per step), and the lists ``hi`` and
            ``lo`` with one int64 array of ``dim * (dim + 1) / 2`` per matrix: the packed upper triangle, row-major,
            of ``(hi * 2^62 + lo) * 2^-60``.
        """
    @staticmethod
    def from_state(state: _State, *, threads: int = 0) -> HessianAccumulator:
        """Make a finished accumulator from `state`'s result.

        Raises
        ------
        loopq.errors.DumpError
            The state breaks its format.
        """

@final
class DampedFactor:
    """``S = H + diag(mu)``, its columns in an order, factored once for all layers with the same input.

    ``S = A diag(p) A^T`` with ``A`` unit upper triangular and rows and columns in the order. Parts that only
    some solvers need are made from `h` on demand: `h` is kept, and a changed one is an error.

    Parameters
    ----------
    h : ndarray of float64 or float32, shape (dim, dim)
        ``X^T X`` over the calibration rows. Its upper triangle is read.
    mu : ndarray of float64, shape (dim,)
        Damping, 0 or more: added to the diagonal.
    order : {'natural', 'diagonal', 'conditional'}
        Order of the sweep: as the columns lie, by falling diagonal of ``S`` (ties by that of ``H``), or by falling
        ``1 / [(S_F)^-1]_jj`` among the columns ``F`` that remain.
    precision : {'float64', 'float32'}
        In which the factor is computed, stored and used. All solvers but `gptq` take float64.
    threads : int
        Number of threads; 0 for all.

    Raises
    ------
    loopq.errors.SolveError
        The diagonal of ``S`` is zero, or a pivot is not positive (named by column).
    loopq.errors.NonFiniteError, loopq.errors.ConfigError
        NaN or infinity in `h`; shapes, or values of `mu`.
    loopq.errors.OutOfMemoryError
        No memory for the factor.
    """

    def __new__(
        cls,
        h: NDArray[np.floating[Any]],
        mu: NDArray[np.float64],
        *,
        order: _Order = "natural",
        precision: _Precision = "float64",
        threads: int = 0,
    ) -> DampedFactor: ...
    def shift(
        self,
        w: NDArray[np.float32],
        cross: NDArray[np.float64],
        alpha: float,
        *,
        threads: int = 0,
    ) -> NDArray[np.float32]:
        """Give ``W (I + alpha C S^-1)``, the target of asymmetric calibration, with ``C = sum (X - X^)^T X^``.

        Parameters
        ----------
        w : ndarray of float32, shape (m, dim)
            Rows are outputs.
        cross : ndarray of float64, shape (dim, dim)
            ``C``.
        alpha : float
            0 gives the weight back.
        threads : int
            Number of threads; 0 for all.
        """

@final
class Grid:
    """The codes and their values (`loopq.layers.grid.Grid.core`).

    Parameters
    ----------
    bits : {2, 3, 4, 5, 6, 8}
        Bits per code; 5 and 6 with `units` alone.
    group_size : int
        Columns per scale; -1 for one scale per row. A ragged last group has its own scale.
    symmetric : bool
        Codes ``-2^(b-1)..2^(b-1)-1`` with ``scale = max|w| / (2^(b-1)-1)``, or ``0..2^b-1`` with a zero point.
    signed : bool
        Let solvers that search the sign make scales of a symmetric grid negative.
    scale_dtype : {'float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e8m0fnu'}
        Type that scales are rounded to before codes are computed.
    scale_bits : int, optional
        Significant bits that scales keep, the leading one included; all of the type when absent.
    scale_exponent : int
        Scales of float8_e4m3fn are times two to this power.
    scale_search : {'max', 'half-range', 'mse'}
        Scale from the largest magnitude: that of the highest code, or of half the range of the codes; or the best of 70
        shrunken ones by square error.
    trellis : tuple of int, optional
        Bits of a state, from ``bits + 2`` to 16, and rows of a stream, where the codes are on a trellis
        (docs/formats/trellis.md): 2, 3 or 4 bits, symmetric.
    levels : list of int, optional
        What codes stand for from the lowest on, in sixteenths of the scale (docs/formats/levels.md): ascending, from
        -127 to 127, symmetric codes.
    units : tuple, optional
        Scales and offsets as whole numbers of units in half precision (docs/formats/gguf.md): groups that share units,
        least and largest number of a scale, largest number of an offset (0: values have none), and what the stored unit
        of scales is divided by. `scale_dtype` is not read then.

    Raises
    ------
    loopq.errors.ConfigError
        A value that is not allowed.
    """

    def __new__(
        cls,
        *,
        bits: int,
        group_size: int,
        symmetric: bool = True,
        signed: bool = False,
        scale_dtype: str = "float32",
        scale_bits: int | None = None,
        scale_exponent: int = 0,
        scale_search: Literal["max", "half-range", "mse"] = "max",
        trellis: tuple[int, int] | None = None,
        levels: list[int] | None = None,
        units: tuple[int, tuple[int, int], int, int] | None = None,
    ) -> Grid: ...

def fit_levels(
    w: NDArray[np.float32], weights: NDArray[np.float64], grid: Grid, *, threads: int = 0
) -> list[int]:
    """Return the levels of least square error for a weight, from those of the grid on.

    Scales, codes and levels are found in turn, each best given the others.

    Parameters
    ----------
    w : ndarray of float32, shape (m, dim)
        Rows are outputs.
    weights : ndarray of float64, shape (dim,)
        How much square errors of a column count.
    grid : Grid
        One with levels.
    threads : int
        Number of threads; 0 for all.

    Raises
    ------
    loopq.errors.ConfigError
        A grid without levels.
    """

def rtn(w: NDArray[np.float32], grid: Grid, *, threads: int = 0) -> dict[str, Any]:
    """Round every weight to the nearest point of its group's grid.

    Parameters
    ----------
    w : ndarray of float32, shape (m, dim)
        Rows are outputs.
    grid : Grid
        A plain one.
    threads : int
        Number of threads; 0 for all.

    Returns
    -------
    dict
        ``codes`` (int8 if symmetric, else uint8; (m, dim)), ``scales`` (float32, (m, G)), ``zeros`` (uint8, (m, G),
        or None).

    Raises
    ------
    loopq.errors.ConfigError, loopq.errors.NonFiniteError, loopq.errors.SolveError
        A grid on a trellis; NaN or infinity in `w`; a scale that the grid's type cannot hold.
    """

def gptq(
    w: NDArray[np.float32],
    factor: DampedFactor,
    grid: Grid,
    *,
    scales: Literal["group", "static"] = "group",
    block_size: int = ...,
    threads: int = 0,
) -> dict[str, Any]:
    """Quantize a weight column by column against a Hessian.

    Parameters
    ----------
    w : ndarray of float32, shape (m, dim)
        Rows are outputs.
    factor : DampedFactor
        The damped Hessian. In another order than 'natural' it asks for ``scales='static'``: groups keep their columns,
        so no ``g_idx`` is needed.
    grid : Grid
        As in `rtn`; where it searches scales, errors of columns are weighted by the factor's pivots.
    scales : {'group', 'static'}
        Take a group's scale when the sweep reaches it, from the updated weights, or before, from the original ones.
    block_size : int
        Columns between two long updates; changes no code.
    threads : int
        Number of threads; 0 for all.

    Returns
    -------
    dict
        ``codes``, ``scales``, ``zeros`` as in `rtn`; ``proxy`` = ``tr(D H D^T)`` and ``proxy_damped`` =
        ``tr(D S D^T)`` with ``D = W^ - W``; ``damping_abs``, the largest of `mu`; ``n_dead_columns``, those whose
        diagonal in ``H`` is zero; ``min_pivot``, ``max_pivot``.

    Raises
    ------
    loopq.errors.ConfigError, loopq.errors.NonFiniteError, loopq.errors.SolveError
        As in `rtn`; shapes that do not fit.

    Notes
    -----
    Column ``j`` is rounded at ``w_j + sum_{i<j} (w_i - q_i) A_ij``, which gives the codes of GPTQ's inverse form.
    """

@final
class GptqCdSettings:
    """Settings of GPTQ with coordinate descent: a grid, and what follows the first sweep.

    Parameters
    ----------
    grid : Grid
        As in `rtn`.
    beam : int
        Paths of codes that GPTQ keeps open in each row; 1: GPTQ as published.
    sweeps : int
        Most times round of one coordinate descent on the codes; 0 leaves it out.
    rounds : int
        Most starts: GPTQ, and GPTQ again with the scales found so far, each followed by the descents.
    refit : bool
        Coordinate descent on the scales too.
    """

    def __new__(cls, grid: Grid, *, beam: int, sweeps: int, rounds: int, refit: bool) -> GptqCdSettings: ...

def gptq_cd(
    w: NDArray[np.float32],
    factor: DampedFactor,
    settings: GptqCdSettings,
    *,
    threads: int = 0,
) -> dict[str, Any]:
    """Quantize a weight by GPTQ with searched scales, then coordinate descent on codes and scales, and again.

    Parameters
    ----------
    w : ndarray of float32, shape (m, dim)
        Rows are outputs.
    factor : DampedFactor
        The damped Hessian, in float64.
    settings : GptqCdSettings
        Grid and stages.
    threads : int
        Number of threads; 0 for all.

    Returns
    -------
    dict
        ``codes``, ``scales``, ``zeros`` as in `rtn`; the damped proxy after the first sweep and at the end,
        ``proxy_swept >= proxy_settled``; ``n_moves``, changes of codes; ``n_rounds``, starts of the row that took most.

    Raises
    ------
    loopq.errors.ConfigError, loopq.errors.NonFiniteError, loopq.errors.SolveError
        Shapes; NaN or infinity in `w`; a group for which the scale type holds no scale.
    """

def coupled(
    w: NDArray[np.float32],
    factor: DampedFactor,
    left: Sequence[DampedFactor],
    settings: GptqCdSettings,
    *,
    passes: int = 1,
    threads: int = 0,
) -> dict[str, Any]:
    """Quantize a weight under a metric on both sides: minimise ``tr(A D S D^T)``, ``A`` between outputs.

    Parameters
    ----------
    w : ndarray of float32, shape (m, dim)
        Rows are outputs.
    factor : DampedFactor
        ``S``, in float64.
    left : sequence of DampedFactor
        ``A`` as consecutive blocks whose sizes add up to m; rows of different blocks are not coupled. The order
        of each is the order in which its rows are solved.
    settings : GptqCdSettings
        Grid and stages, for each row.
    passes : int
        Most times that descents go on in every row with all others fixed, and are taken where the loss falls.
    threads : int
        Number of threads; 0 for all. Blocks are dealt to threads; rows of a block are not.

    Returns
    -------
    dict
        ``codes``, ``scales``, ``zeros`` as in `rtn`; ``coupled_swept >= coupled_settled``, the damped loss after
        the sweep over rows and at the end; ``n_replaced``, rows changed after the sweep.

    Raises
    ------
    loopq.errors.ConfigError, loopq.errors.NonFiniteError, loopq.errors.SolveError
        As in `gptq_cd`; blocks that do not add up to the rows.
    """

def trellis(
    w: NDArray[np.float32],
    factor: DampedFactor,
    left: Sequence[DampedFactor],
    grid: Grid,
    *,
    threads: int = 0,
) -> dict[str, Any]:
    """Code a weight on a bitshift trellis under a metric on both sides: minimise ``tr(A D S D^T)``.

    Parameters
    ----------
    w : ndarray of float32, shape (m, dim)
        Rows are outputs.
    factor : DampedFactor
        ``S``, in float64.
    left : sequence of DampedFactor
        ``A`` as consecutive blocks of order "natural" whose sizes add up to m. In each column the codes of a block
        are one stream.
    grid : Grid
        On a trellis.
    threads : int
        Number of threads; 0 for all. Blocks run side by side.

    Returns
    -------
    dict
        ``codes`` (int8, code - 2^(bits-1)), ``scales``, ``zeros`` (None) as in `rtn`; ``coupled_swept >=
        coupled_settled``, the damped loss after the columns and with the scales solved for.

    Raises
    ------
    loopq.errors.ConfigError, loopq.errors.NonFiniteError, loopq.errors.SolveError
        Settings or blocks that do not fit; NaN or infinity in `w`; a group for which the scale type holds no scale.
    """

def dequantize(
    codes: NDArray[np.int8] | NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8] | None,
    grid: Grid,
) -> NDArray[np.float32]:
    """Give what codes stand for, in float32, shape (m, dim).

    That is ``code * scale`` of int8 codes, ``(code - zero) * scale`` of uint8 codes, and on a trellis
    ``value(state) * scale`` of int8 codes, or of uint8 codes without the offset.
    """

def proxy(
    w: NDArray[np.float32], w_hat: NDArray[np.float32] | None, h: NDArray[np.floating[Any]], threads: int = 0
) -> float:
    """Give ``tr((W^ - W) H (W^ - W)^T)`` in float64; ``w_hat=None`` stands for zero and gives ``tr(W H W^T)``."""

def eigvalsh(h: NDArray[np.floating[Any]], threads: int = 0) -> NDArray[np.float64]:
    """Give all eigenvalues of a symmetric matrix, ascending, in float64. Its upper triangle is read."""

def count_above(
    h: NDArray[np.floating[Any]], fractions: Sequence[float], threads: int = 0
) -> tuple[float, list[int]]:
    """Count the eigenvalues of a positive semi-definite matrix above fractions of the largest.

    Parameters
    ----------
    h : ndarray of float64 or float32, shape (dim, dim)
        Its upper triangle is read.
    fractions : sequence of float
        Each 0 or more and below 1.
    threads : int
        Number of threads; 0 for all.

    Returns
    -------
    largest : float
        The largest eigenvalue, to about ten digits or more; 0 for a matrix of zeros.
    above : list of int
        For each fraction the number of eigenvalues above ``fraction * largest``.

    Notes
    -----
    By Sylvester's law of inertia that is the number of positive pivots of ``H - fraction * largest * I``: one
    factorisation, of ``dim^3 / 3`` operations, for each fraction. Its backward error is estimated and bounded by
    ``1e-10 * largest``; where two orders of the columns both exceed that, all eigenvalues are computed.
    """

def pack_dense(
    codes: NDArray[np.int8] | NDArray[np.uint8], bits: int, zero_offset: int = 0
) -> NDArray[np.int32]:
    """Pack codes along the last axis: code ``j`` plus `zero_offset` takes bits ``[j*b, (j+1)*b)``, low bit first.

    Codes of uint8 are biased already and take no offset.

    Returns
    -------
    ndarray of int32, shape (m, ceil(dim * bits / 32))

    Raises
    ------
    loopq.errors.ConfigError
        Bits that do not exist, a code that does not fit, or an offset for uint8 codes.
    """

def unpack_dense(
    packed: NDArray[np.int32], bits: int, dim: int, zero_offset: int = 0
) -> NDArray[np.int8] | NDArray[np.uint8]:
    """Undo `pack_dense`: uint8 codes if `zero_offset` is 0, else int8 codes ``u - zero_offset``, shape (m, dim)."""

def marlin_pack(
    codes: NDArray[np.int8] | NDArray[np.uint8], scales: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Pack 4-bit symmetric codes (N, K) and scales (N, G) to Marlin's ``(K/16, 2N)`` words and ``(G, N)`` scales.

    Raises
    ------
    loopq.errors.ConfigError
        ``K`` is no multiple of 16 or ``N`` none of 64, or a code does not fit.
    """

def marlin_unpack(
    packed: NDArray[np.int32], scales: NDArray[np.float32]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Undo `marlin_pack`."""

def w4_pack(codes: NDArray[np.int8] | NDArray[np.uint8], threads: int = 0) -> NDArray[np.int32]:
    """Pack 4-bit symmetric codes (out, in) to the int4 kernel's layout `lq-w4` (kernels/README.md).

    Parameters
    ----------
    codes : ndarray of int8 in -8..7, or of uint8 in 0..15, shape (out, in)
        `out` a multiple of 16, `in` a multiple of 32.
    threads : int
        0 for all.

    Returns
    -------
    ndarray of int32, shape (out / 16, ceil(in / 64) * 128)
        A strip of 16 outputs per row; a short last tile is filled up with the code of zero.

    Raises
    ------
    loopq.errors.ConfigError
        Another shape, or a code that does not fit.
    """

def w4_unpack(packed: NDArray[np.int32], in_features: int, threads: int = 0) -> NDArray[np.int8]:
    """Undo `w4_pack`: int8 codes, shape (out, in_features).

    Raises
    ------
    loopq.errors.ConfigError
        `packed` does not have the shape that `in_features` asks for, or holds codes beyond it.
    """

def cpu_engines() -> list[str]:
    """Name the instruction sets that products with packed codes can run with here; the last one is in use.

    Returns
    -------
    list of str
        "portable", and where found "avx2", "avx512vnni", "avx512vnni+vbmi",
        "amx+avx512vnni", "neon+dotprod".
    """

def cpu_read(data: NDArray[np.uint8], repeats: int = 1, threads: int = 0) -> int:
    """Read an array `repeats` times, each thread always its part: what the speed of products is compared with.

    Returns
    -------
    int
        Sum of its 64-bit words, modulo 2**64, over all repeats.
    """

_RunnerWeight = tuple[
    CpuLayout | None,
    NDArray[Any],
    NDArray[np.float32] | None,
    list[tuple[int, list[NDArray[np.float32]]]] | None,
]

@final
class CpuRunner:
    """A looped decoder as one program, with its keys and values (`loopq.runtime.runner`).

    Parameters
    ----------
    weights : list of tuple
        Layout and codes, or None and a float32 or uint16 (bfloat16 bits) matrix (out, in); bias, float32 (out,), or
        None. These arrays are kept, not copied. Then the blocks of an input transform, or None: how many side by side,
        and their factors, each a square matrix, or a vector of divisors.
    norms : list of tuple
        Weight and what is added to the mean of squares: RMS norms.
    blocks : list of dict
        `heads`, `kv_heads`, `head`, `neighbours`, `scale`, `qk_bias`, `gates`, and numbers of weights and norms: `qkv`,
        `out`, `gate_up`, `down`, `qk_norms`, and `norms`, three (input, branch, stream) for attention and for the MLP.
    order : list of tuple
        ("block", number), ("norm", number), ("keep", 0 or 1), ("take", 0 or 1), ("add", 0 or 1), ("start", 0),
        ("adapter", number of a weight).
    head : int
        Number of the weight that gives logits.
    precision : str
        See `CpuLayout.multiply`.
    kept : {"float32", "bfloat16", "int8", "int4"}
        How keys and values are kept; codes have a bfloat16 scale for each 32 channels.

    Raises
    ------
    loopq.errors.ConfigError
        Numbers or shapes that do not fit together.
    """

    def __new__(
        cls,
        weights: list[_RunnerWeight],
        norms: list[tuple[list[float], float]],
        blocks: list[dict[str, Any]],
        order: list[tuple[str, int]],
        head: int,
        *,
        precision: Literal["int8", "fixed16", "fixed24"],
        kept: Literal["float32", "bfloat16", "int8", "int4"],
    ) -> CpuRunner: ...
    @property
    def seen(self) -> int:
        """Number of tokens with stored keys and values."""

    def restart(self) -> None:
        """Forget all tokens."""

    def run(
        self,
        x: NDArray[np.float32],
        angles: NDArray[np.float32],
        logits: NDArray[np.float32],
        start: NDArray[np.float32] | None = None,
        *,
        threads: int = 0,
    ) -> None:
        """Go on by some tokens.

        Parameters
        ----------
        x : ndarray of float32, shape (tokens, width)
            Embeddings.
        angles : ndarray of float32, shape (positions, head)
            Cosine and sine of each pair, for all positions so far at least.
        logits : ndarray of float32, shape (n, vocabulary)
            Filled with those of the last n tokens; n may be 0.
        start : ndarray of float32, shape (tokens, width), optional
            Initial states, where the order has a step "start".
        threads : int
            0 for all. Changes no bit of the result.

        Raises
        ------
        loopq.errors.ConfigError
            Shapes that do not fit together. All tokens are forgotten then.
        """

@final
class CpuLayout:
    """Where the codes and scales of a layer lie for products on the processor (docs/cpu.md).

    Parameters
    ----------
    out_features, in_features : int
        1 or more.
    grid : Grid
        Scales are stored in its type, in all its bits.

    Raises
    ------
    loopq.errors.ConfigError
        Another setting.
    loopq.errors.OutOfMemoryError
        Inputs whose blocks memory does not hold.
    """

    def __new__(cls, out_features: int, in_features: int, grid: Grid) -> CpuLayout: ...
    @property
    def n_bytes(self) -> int:
        """Bytes of the packed weight."""

    def pack(
        self,
        codes: NDArray[np.int8] | NDArray[np.uint8],
        scales: NDArray[np.float32],
        out: NDArray[np.uint8],
        zeros: NDArray[np.uint8] | None = None,
        threads: int = 0,
    ) -> None:
        """Pack a layer into `out`.

        Parameters
        ----------
        codes : ndarray of int8 (signed) or uint8 (biased), shape (out, in)
        scales : ndarray of float32, shape (out, groups)
            Rounded to the layout's type.
        out : ndarray of uint8, shape (n_bytes,)
            C order; best on a 64-byte boundary.
        zeros : ndarray of uint8, shape (out, groups), or None
            Zero points of an asymmetric layout.
        threads : int
            0 for all.

        Raises
        ------
        loopq.errors.ConfigError
            Another shape, or a code that does not fit.
        loopq.errors.NonFiniteError
            A scale that is NaN or infinite.
        loopq.errors.SolveError
            A scale beyond the range of the layout's type.
        """

    def unpack(self, packed: NDArray[np.uint8], threads: int = 0) -> NDArray[np.int8] | NDArray[np.uint8]:
        """Undo `pack`: codes (out, in), int8 of a symmetric layout, else uint8.

        Raises
        ------
        loopq.errors.ConfigError
            `packed` has another size.
        """

    def rows(
        self, packed: NDArray[np.uint8], numbers: NDArray[np.int64]
    ) -> NDArray[np.int8] | NDArray[np.uint8]:
        """Codes (n, in) of some outputs, in the order of their numbers; as `unpack`.

        Raises
        ------
        loopq.errors.ConfigError
            `packed` has another size, there is no such output, or the codes are on a trellis.
        """

    def multiply(
        self,
        packed: NDArray[np.uint8],
        x: NDArray[np.float32] | NDArray[np.uint16],
        out: NDArray[np.float32] | NDArray[np.uint16],
        bias: NDArray[np.float32] | None = None,
        *,
        precision: Literal["int8", "fixed16", "fixed24"],
        threads: int = 0,
    ) -> None:
        """``out = x W^T + bias``.

        Parameters
        ----------
        packed : ndarray of uint8, shape (n_bytes,)
        x : ndarray of float32, or of uint16 that holds bfloat16 bits, shape (tokens, in)
        out : ndarray of float32, or of uint16 for bfloat16 bits, shape (tokens, out)
            C order.
        bias : ndarray of float32, shape (out,), or None
            Added before the one rounding of the result.
        precision : str
            Bits of the integers that each block of activations becomes: at most 256 inputs of one group.
        threads : int
            0 for all. Changes no bit of the result.

        Raises
        ------
        loopq.errors.ConfigError
            Shapes that do not fit together.

        Notes
        -----
        A token whose activations hold NaN or infinity gets NaN results. The others do not depend on it.
        """
