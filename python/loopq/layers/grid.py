"""The grid of codes: allowed codes, their values, and their storage."""

from __future__ import annotations

import dataclasses
from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import ConfigError
from loopq.layers.reader import TensorReader
from loopq.storage.files import DTYPE_NAMES, ITEM_SIZE, RawTensor, float_to_raw

Bits = Literal[2, 3, 4, 8]
ScaleType = Literal["float32", "float16", "bfloat16"]
ScaleSearch = Literal["max", "half-range", "mse"]
BITS: tuple[int, ...] = get_args(Bits)
#: Bits including those of GGUF types.
ALL_BITS = (*BITS, 5, 6)
SCALE_DTYPES: tuple[str, ...] = get_args(ScaleType)
#: Significant bits of a scale type, including the leading one.
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
#: Group size that means one scale per output row.
PER_CHANNEL = -1

#: Codes, scales, zero points of a layer.
Arrays = tuple[NDArray[Any], NDArray[np.float32], NDArray[Any] | None]


def halved(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack two 4-bit numbers per byte in GGUF's order: the first half of each block in the low halves."""
    half = values.shape[-1] // 2
    return np.asarray((values[..., :half] & 15) | values[..., half:] << 4, dtype=np.uint8)


class BlockType(NamedTuple):
    """A type of GGUF blocks, or of plain numbers there.

    Parameters
    ----------
    name : str
        llama.cpp's name of the type.
    number : int
        llama.cpp's number (`llama_ftype`) of a file that is called by this type.
    place : int
        A file with several types is called by the one of lowest place: ten times its bits, and its place among the
        types of these bits.
    """

    name: str
    number: int
    place: int


@dataclass(frozen=True)
class Grid(ABC):
    """Allowed codes of a layer and their values. Each kind is a file of `loopq.layers.grids`.

    A kind is a frozen dataclass. A file stores its name and its fields, and reading checks them against their
    annotations.

    Parameters
    ----------
    bits : {2, 3, 4, 8}
        Bits of a code. GGUF types also use 5 and 6.
    group_size : int
        Input columns that share a scale. With -1 each output row has one scale. A last group may be shorter.
    scale_dtype : {"float32", "float16", "bfloat16"}
        Stored type of the scales.

    Attributes
    ----------
    name : str
        Name in `loopq.layers.grids.GRIDS`.
    symmetric : bool
        Signed codes without zero points, or else unsigned codes with a zero point per group.
    plain : bool
        Whether a code stands for its own value times the scale, independent of neighbouring codes. Products on any
        device, table rows and the runner require it.
    portable : bool
        Whether other tools' integer formats can hold such codes.
    instead : str
        How to get codes that they can hold, for messages.
    scale_dtypes : tuple of str
        Allowed storage types of scales.
    """

    bits: int
    group_size: int
    scale_dtype: str

    name: ClassVar[str]
    symmetric: ClassVar[bool] = True
    plain: ClassVar[bool] = True
    portable: ClassVar[bool] = True
    instead: ClassVar[str] = "with --levels even (`quantize --format` has them by itself)"
    #: Whether a scale may be any number of its type, independent of other groups.
    own_scales: ClassVar[bool] = True
    #: Type of zero points, or of offsets.
    zeros_dtype: ClassVar[type[np.generic]] = np.uint8
    #: Whether scales may be negative; None if the solver decides.
    signed: ClassVar[bool | None] = None
    scale_dtypes: ClassVar[tuple[str, ...]] = SCALE_DTYPES

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"bits must be one of {BITS}; got {self.bits}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise ConfigError(
                f"group_size must be positive, or -1 for one scale per output; got {self.group_size}"
            )
        if self.scale_dtype not in self.scale_dtypes:
            raise ConfigError(
                f"scale_dtype must be one of {', '.join(self.scale_dtypes)}; got {self.scale_dtype!r}"
            )

    def fitted(self, weight: NDArray[np.float32], energies: NDArray[np.float64] | None, threads: int) -> Grid:
        """Return the grid for one weight (out, in). `energies` (in,) are the error weights of the columns."""
        return self

    @property
    def levels(self) -> NDArray[np.float32] | None:
        """Values of the codes in ascending order, in scales. None if the value is the code minus the zero point."""
        return None

    def described(self) -> dict[str, Any]:
        """Return plain data for `loopq.layers.grids.grid_of`: the kind, its symmetry and the fields of its class."""
        fields = dataclasses.asdict(self)
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        return {"kind": self.name, "symmetric": self.symmetric, **plain}

    @property
    def label(self) -> str:
        """Name in reports: "INT4"."""
        return f"INT{self.bits}"

    @property
    def panels(self) -> bool:
        """Whether the CPU layout supports such codes."""
        return True

    @property
    def compressed(self) -> tuple[str, dict[str, Any]] | None:
        """Return format and scheme in compressed-tensors; None if it cannot hold such codes."""
        if not self.portable:
            return None
        channel = self.group_size == PER_CHANNEL
        return "pack-quantized", {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if channel else "group",
            "group_size": None if channel else self.group_size,
            "dynamic": False,
        }

    @classmethod
    def from_compressed(cls, reader: TensorReader, module: str) -> dict[str, Any] | None:
        """Return the settings of a module in this kind's own compressed-tensors format."""
        return None

    @property
    def gguf(self) -> BlockType | None:
        """GGUF blocks that hold such codes bit for bit; None without such blocks."""
        return None

    @property
    def gguf_width(self) -> int:
        """Weights of a GGUF block."""
        return 32

    def gguf_blocks(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> list[NDArray[np.uint8]]:
        """Return the bytes of scales and of codes, for codes (rows, blocks, 32) and scales (rows, blocks)."""
        kept = np.ascontiguousarray(scales, dtype="<f2").reshape(*scales.shape, 1).view(np.uint8)
        return [kept, codes.view(np.uint8) if self.bits == 8 else halved(codes.view(np.uint8) + self.offset)]

    def gguf_data(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any] | None
    ) -> NDArray[np.uint8]:
        """Return the GGUF blocks (out, bytes) of codes in groups as long as a block."""
        rows = len(codes)
        parts = self.gguf_blocks(codes.reshape(rows, -1, self.gguf_width), scales)
        return np.concatenate(parts, -1).reshape(rows, -1)

    def check_columns(self, columns: int) -> None:  # noqa: B027  # most kinds take any
        """Refuse row widths that the kind does not support.

        Raises
        ------
        ConfigError
            The message gives the supported widths.
        """

    @property
    def dtype(self) -> type[np.generic]:
        """Type of the codes: int8 or uint8."""
        return np.int8 if self.symmetric else np.uint8

    @property
    def offset(self) -> int:
        """Offset added to a code in storage: the code of zero, or 0 for unsigned codes."""
        return 1 << (self.bits - 1) if self.symmetric else 0

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return -self.offset, (1 << self.bits) - 1 - self.offset

    def width(self, columns: int) -> int:
        """Columns of a group in a row of `columns` columns."""
        return columns if self.group_size == PER_CHANNEL else self.group_size

    def n_groups(self, columns: int) -> int:
        """Scales of a row of `columns` input columns."""
        return -(-columns // self.width(columns))

    def core(
        self,
        *,
        scale_search: ScaleSearch = "max",
        signed: bool = False,
        scale_bits: int | None = None,
        scale_dtype: str | None = None,
    ) -> native.Grid:
        """Return the grid in the core's form.

        Parameters
        ----------
        scale_search : {"max", "half-range", "mse"}
            Scale search of a solver.
        signed : bool
            Allow a solver to make scales negative.
        scale_bits : int, optional
            Significant bits of a solver's scales. All bits of the type are kept when absent.
        scale_dtype : str, optional
            Another type that holds the scales exactly.
        """
        return native.Grid(
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            signed=signed if self.signed is None else self.signed,
            scale_dtype=scale_dtype or self.scale_dtype,
            scale_bits=scale_bits,
            scale_search=scale_search,
            **self._native(),
        )

    def _native(self) -> dict[str, Any]:
        """Return further arguments of the core: the values of codes that are not even."""
        return {}

    def check(self, codes: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any] | None) -> None:
        """Refuse arrays that are impossible for a layer on this grid.

        Raises
        ------
        ConfigError
            Types or shapes do not match, or a code exceeds the bits.
        """
        if codes.ndim != 2 or codes.size == 0 or codes.dtype != self.dtype:
            raise ConfigError(
                f"codes are {codes.dtype} of shape {codes.shape}; expected {self.dtype.__name__} (out, in)"
            )
        expected = (codes.shape[0], self.n_groups(codes.shape[1]))
        if scales.shape != expected:
            raise ConfigError(f"scales of shape {scales.shape}; expected {expected} (output by group)")
        self._check_zeros(zeros, expected)
        low, high = self.limits
        if codes.min() < low or codes.max() > high:
            raise ConfigError(f"{self.bits}-bit codes lie in {low}..{high}; got {codes.min()}..{codes.max()}")

    def _check_zeros(self, zeros: NDArray[Any] | None, expected: tuple[int, int]) -> None:
        if zeros is not None:
            raise ConfigError(f"zero points of shape {zeros.shape}; {self.label} codes have none")

    def dequantize(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None = None
    ) -> NDArray[np.float32]:
        """Return the values of codes (out, in), float32."""
        return native.dequantize(codes, scales, zeros, self.core())

    def n_bytes(self, rows: int, columns: int) -> int:
        """Bytes of `tensors` without the shape, counted without packing."""
        words = rows * -(-columns * self.bits // 32)
        return 4 * words + ITEM_SIZE[DTYPE_NAMES[self.scale_dtype]] * rows * self.n_groups(columns)

    def tensors(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None
    ) -> dict[str, RawTensor]:
        """Return the stored tensors. Names follow compressed-tensors; docs/formats/checkpoint.md has the layout."""
        return {
            "weight_packed": RawTensor.of(native.pack_dense(codes, self.bits, self.offset)),
            "weight_scale": float_to_raw(scales, DTYPE_NAMES[self.scale_dtype]),
            "weight_shape": RawTensor.of(np.array(codes.shape, dtype=np.int64)),
        }

    def read(self, reader: TensorReader, module: str, rows: int, columns: int) -> Arrays:
        """Read the result of `tensors` and check every shape, type and code range.

        Raises
        ------
        CheckpointError
            The message names the file and the tensor.
        """
        codes = reader.codes(f"{module}.weight_packed", self.bits, columns, rows, offset=self.offset)
        kind = DTYPE_NAMES[self.scale_dtype]
        scales = reader.scales(f"{module}.weight_scale", (rows, self.n_groups(columns)), [kind])
        return codes, scales, None
