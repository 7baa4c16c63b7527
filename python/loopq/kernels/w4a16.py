"""The int4 product as a torch operator: checks, launch, reference, registration.

Importing this module needs torch; CuPy is asked for at the first call on a CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loopq.config import INT4_KERNEL_TOKENS
from loopq.errors import KernelError
from loopq.kernels.layout import K_STEP, N_STEP, TILE_K, WORDS_PER_TILE, packed_shape
from loopq.kernels.load import Backend, Kernel, cuda_backend
from loopq.kernels.plan import (
    TOKENS_PER_LAUNCH,
    GemmShape,
    Plan,
    Variant,
    fold_of,
    make_plan,
    token_tiles_for,
)

__all__ = [
    "Workspace",
    "dequantize_packed",
    "launch_dequantize",
    "launch_gemm",
    "w4a16_linear",
    "w4a16_linear_ref",
]

_OUT_FLOAT32, _EVICT_FIRST = 1, 2
_ACTIVATIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SCALES = {torch.float32: "f32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Weights that fit in the L2 beside everything else are asked to stay; longer streams make room first.
_STAYS_IN_L2_BYTES = 24 * 1024 * 1024


@dataclass
class Workspace:
    """Scratch memory of split-K products: float32 partial sums, and counters that are zero between launches.

    One workspace serves one stream (or one captured graph) at a time: two launches that run at once would mix
    their partial sums.
    """

    partials: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(cls, n_floats: int, n_counters: int, device: torch.device) -> Workspace:
        return cls(
            torch.empty(max(n_floats, 1), dtype=torch.float32, device=device),
            torch.zeros(max(n_counters, 1), dtype=torch.int32, device=device),
        )


def _refuse(what: str) -> KernelError:
    return KernelError(f"w4a16_linear: {what}")


def _check_types(x: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor) -> None:
    if x.dtype not in _ACTIVATIONS and x.device.type != "cpu":
        raise _refuse(
            f"activations are {x.dtype}; the kernel takes bfloat16 and float16. Cast x, or the model"
        )
    if not x.is_floating_point():
        raise _refuse(f"activations are {x.dtype}; a floating-point type is needed")
    if qweight.dtype != torch.int32:
        raise _refuse(f"the packed weight is {qweight.dtype}; expected int32 words as made by pack_w4")
    if scales.dtype not in _SCALES:
        raise _refuse(f"scales are {scales.dtype}; expected float32, bfloat16 or float16")


def _check_shapes(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    in_features: int,
    group_size: int,
    k_begin: int,
) -> None:
    out_features = qweight.shape[0] * N_STEP
    if qweight.dim() != 2 or tuple(qweight.shape) != packed_shape(out_features, in_features):
        raise _refuse(
            f"packed weight of shape {tuple(qweight.shape)} does not hold {in_features} inputs: expected "
            f"(out / {N_STEP}, {-(-in_features // TILE_K) * WORDS_PER_TILE})"
        )
    fold_of(group_size)
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    if tuple(scales.shape) != (groups, out_features):
        raise _refuse(
            f"scales of shape {tuple(scales.shape)}; expected ({groups}, {out_features}), group by output"
        )
    width = x.shape[-1] if x.dim() else 0
    if k_begin < 0 or k_begin % K_STEP or width == 0 or width % K_STEP or k_begin + width > in_features:
        raise _refuse(
            f"x has {width} features from input {k_begin} on; a range of the layer's {in_features} inputs "
            f"that begins "
            f"and ends at a multiple of {K_STEP} is needed"
        )


def _check_extras(
    x: torch.Tensor, out_features: int, bias: torch.Tensor | None, addend: torch.Tensor | None
) -> None:
    if bias is not None and (tuple(bias.shape) != (out_features,) or bias.dtype != torch.float32):
        raise _refuse(f"bias is {bias.dtype} {tuple(bias.shape)}; expected float32 ({out_features},)")
    if addend is not None:
        expected = (*x.shape[:-1], out_features)
        if tuple(addend.shape) != expected or addend.dtype != torch.float32:
            raise _refuse(f"addend is {addend.dtype} {tuple(addend.shape)}; expected float32 {expected}")


def _check(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    in_features: int,
    group_size: int,
    k_begin: int,
) -> None:
    for name, tensor in (("qweight", qweight), ("scales", scales), ("bias", bias), ("addend", addend)):
        if tensor is not None and tensor.device != x.device:
            raise _refuse(f"{name} is on {tensor.device}, x on {x.device}: move the layer or the input")
    _check_types(x, qweight, scales)
    _check_shapes(x, qweight, scales, in_features, group_size, k_begin)
    _check_extras(x, qweight.shape[0] * N_STEP, bias, addend)


def _rows(x: torch.Tensor, what: str) -> torch.Tensor:
    """x as (rows, width) with unit stride along the width, without a copy.

    Raises
    ------
    KernelError
        If the strides do not allow it.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise _refuse(
            f"{what} has stride {x.stride(-1)} along its last dimension; the kernel needs 1: .contiguous()"
        )
    if x.dim() == 1:
        return x.unsqueeze(0)
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError as error:
        raise _refuse(
            f"{what} of shape {tuple(x.shape)} and strides {x.stride()} has no uniform row stride: "
            f".contiguous()"
        ) from error


def _check_alignment(x: torch.Tensor, named: dict[str, torch.Tensor]) -> None:
    if x.shape[0] > 1 and x.stride(0) % 8:
        raise _refuse(f"x has a row stride of {x.stride(0)} elements; the kernel needs a multiple of 8")
    for name, tensor in named.items():
        if tensor.data_ptr() % 16:
            raise _refuse(f"{name} starts at an address that is not a multiple of 16: .clone() it")
        if name != "x" and not tensor.is_contiguous():
            raise _refuse(f"{name} is not contiguous: .contiguous() it once, when the layer is built")


def _shape(qweight: torch.Tensor, group_size: int, k_begin: int, k_end: int, rows: int) -> GemmShape:
    return GemmShape(qweight.shape[0] * N_STEP, k_begin, k_end, group_size, token_tiles_for(rows))


def workspace_size(
    backend: Backend, layer: tuple[int, int, int, int], rows: int, bulk: bool = False
) -> tuple[int, int]:
    """Partial sums and counters for (out_features, k_begin, k_end, group_size) at any 1..`rows` tokens."""
    floats = pairs = 0
    for tiles in (1, 2, 4):
        shape = GemmShape(*layer, tiles)
        plan = make_plan(shape, backend.limits, bulk, backend.ring_stages)
        pairs = shape.pairs
        if plan.slices > 1:
            floats = max(floats, plan.slices * pairs * 256 * tiles)
        if tiles >= token_tiles_for(min(rows, TOKENS_PER_LAUNCH)):
            break
    return floats, pairs


def workspace_for(
    backend: Backend,
    layers: list[tuple[int, int, int, int]],
    rows: int,
    device: torch.device,
    bulk: bool = False,
) -> Workspace:
    """One workspace for layers (out_features, k_begin, k_end, group_size), at up to `rows` tokens."""
    sizes = [workspace_size(backend, layer, rows, bulk) for layer in layers]
    return Workspace.allocate(max(size[0] for size in sizes), max(size[1] for size in sizes), device)


def launch_gemm(
    backend: Backend,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    workspace: Workspace,
    plan: Plan | None = None,
    bulk: bool = False,
) -> None:
    """Launch the product for x (rows, width) into out (rows, out_features), 32 rows at a time.

    The caller has checked types and shapes (`w4a16_linear` does); this adds what only a kernel needs.

    Raises
    ------
    KernelError
        If a pointer or a row stride is not aligned.
    """
    _check_alignment(x, {"x": x, "qweight": qweight, "scales": scales})
    k_end = k_begin + x.shape[1]
    flags = _OUT_FLOAT32 if out.dtype == torch.float32 else 0
    flags |= _EVICT_FIRST if qweight.numel() * 4 > _STAYS_IN_L2_BYTES else 0
    for start in range(0, x.shape[0], TOKENS_PER_LAUNCH):
        part = x[start : start + TOKENS_PER_LAUNCH]
        rows = part.shape[0]
        shape = _shape(qweight, group_size, k_begin, k_end, rows)
        cut = plan or make_plan(shape, backend.limits, bulk, backend.ring_stages)
        variant = Variant(
            _ACTIVATIONS[x.dtype], shape.token_tiles, cut.fold, cut.stages, cut.bulk, _SCALES[scales.dtype]
        )
        rows_out = out[start : start + rows]
        rows_addend = None if addend is None else addend[start : start + rows]
        numbers = (
            *(
                rows,
                shape.out_features,
                -(-in_features // TILE_K),
                k_begin,
                k_end,
                part.stride(0),
                rows_out.stride(0),
            ),
            *(0 if rows_addend is None else rows_addend.stride(0), cut.group_shift, scales.shape[0], flags),
        )
        backend.launch(
            Kernel("w4a16_gemm.cu", "loopq_w4a16_gemm", variant.defines),
            (cut.blocks, cut.slices),
            cut.warps * 32,
            cut.shared_bytes(rows, shape.token_tiles),
            (
                *(t.data_ptr() for t in (part, qweight, scales, rows_out)),
                *(0 if t is None else t.data_ptr() for t in (bias, rows_addend)),
                *(workspace.partials.data_ptr(), workspace.counters.data_ptr()),
                *(np.int32(v) for v in numbers),
            ),
        )


def launch_dequantize(
    backend: Backend, qweight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, group_size: int
) -> None:
    """Write s * q, rounded once to out's type (bfloat16 or float16), into out (out_features, in_features)."""
    out_features, in_features = out.shape
    tiles = qweight.numel() // WORDS_PER_TILE
    kind = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[scales.dtype]
    group = in_features if group_size == -1 else group_size
    numbers = (out_features, in_features, -(-in_features // TILE_K), group, scales.shape[0], kind)
    half = "true" if out.dtype == torch.float16 else "false"
    backend.launch(
        Kernel("w4_dequantize.cu", "loopq_w4_dequantize", (f"-DLQ_FLOAT16={half}",)),
        (min(-(-tiles // 8), 16 * backend.limits.multiprocessors), 1),
        256,
        0,
        (qweight.data_ptr(), scales.data_ptr(), out.data_ptr(), *(np.int32(v) for v in numbers)),
    )


def dequantize_packed(
    qweight: torch.Tensor, scales: torch.Tensor, in_features: int, group_size: int
) -> torch.Tensor:
    """s * q of a packed weight in float32, (out_features, in_features), with torch operations on any device.

    Parameters
    ----------
    qweight : torch.Tensor, int32, shape (out / 16, ceil(in / 64) * 128)
    scales : torch.Tensor, shape (groups, out)
    in_features, group_size : int
        -1 for one scale per output.

    Returns
    -------
    torch.Tensor, float32, shape (out, in)
    """
    strips = qweight.shape[0]
    words = qweight.view(strips, -1, 8, 4, 4)  # tile, column, pair, step
    tiles = words.shape[1]
    codes = qweight.new_empty((strips, 2, 8, tiles, 4, 2, 4, 2), dtype=torch.float32)
    for half in range(2):
        for high in range(2):
            for odd in range(2):
                nibble = (words >> (4 * (2 * half + high + 4 * odd))) & 15
                codes[:, half, :, :, :, high, :, odd] = (nibble - 8).permute(0, 2, 1, 4, 3).float()
    weight = codes.view(strips * N_STEP, tiles * TILE_K)[:, :in_features]
    return weight * spread_scales(scales, in_features, group_size)


def spread_scales(scales: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor:
    """Scales (groups, out) as float32 (out, in): one per input, the last group cut short."""
    if group_size == -1:
        return scales.float().t()
    return scales.float().t().repeat_interleave(group_size, dim=1)[:, :in_features]


def w4a16_linear_ref(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    *,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The plain twin of the kernel: float32 weights, float32 product, one rounding at the end."""
    weight = dequantize_packed(qweight, scales, in_features, group_size)[:, k_begin : k_begin + x.shape[-1]]
    out = x.float() @ weight.t()
    if bias is not None:
        out = out + bias
    if addend is not None:
        out = out + addend
    return out.to(x.dtype if out_dtype is None else out_dtype)


_COUNTERS: dict[tuple[int, int], torch.Tensor] = {}


def _eager_workspace(
    backend: Backend, layer: tuple[int, int, int, int], rows: int, device: torch.device
) -> Workspace:
    floats, pairs = workspace_size(backend, layer, rows)
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed beside anything: it gets counters of its own, zeroed in each replay.
        return Workspace.allocate(floats, pairs, device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    counters = _COUNTERS.get(key)
    if counters is None or counters.numel() < pairs:
        counters = _COUNTERS[key] = torch.zeros(max(pairs, 4096), dtype=torch.int32, device=device)
    return Workspace(torch.empty(max(floats, 1), dtype=torch.float32, device=device), counters)


def run_linear(
    backend: Backend,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    *,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    out_dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """The product on a backend: the kernel, or above INT4_KERNEL_TOKENS tokens dequantise and multiply."""
    rows = _rows(x, "x")
    out_features = qweight.shape[0] * N_STEP
    dtype = x.dtype if out_dtype is None else out_dtype
    flat_addend = None if addend is None else _rows(addend, "addend")
    out = torch.empty((rows.shape[0], out_features), dtype=dtype, device=x.device)
    if rows.shape[0] > INT4_KERNEL_TOKENS:
        weight = torch.empty((out_features, in_features), dtype=x.dtype, device=x.device)
        launch_dequantize(backend, qweight, scales, weight, group_size)
        product = torch.nn.functional.linear(rows, weight[:, k_begin : k_begin + rows.shape[1]])
        if bias is not None or addend is not None:
            product = (
                product.float() + (0 if bias is None else bias) + (0 if flat_addend is None else flat_addend)
            )
        out.copy_(product)
    elif rows.shape[0] > 0:
        layer = (out_features, k_begin, k_begin + rows.shape[1], group_size)
        launch_gemm(
            backend,
            rows,
            qweight,
            scales,
            out,
            in_features=in_features,
            group_size=group_size,
            k_begin=k_begin,
            bias=bias,
            addend=flat_addend,
            workspace=workspace or _eager_workspace(backend, layer, rows.shape[0], x.device),
        )
    return out.view(*x.shape[:-1], out_features)


_SCHEMA = (
    "w4a16_linear(Tensor x, Tensor qweight, Tensor scales, Tensor? bias, Tensor? addend, int in_features, "
    "int group_size, int k_begin=0, ScalarType? out_dtype=None) -> Tensor"
)
_library = torch.library.Library("loopq", "FRAGMENT")
_library.define(_SCHEMA)


def _on_cpu(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _check(x, qweight, scales, bias, addend, in_features, group_size, k_begin)
    numbers: dict[str, Any] = {"in_features": in_features, "group_size": group_size, "k_begin": k_begin}
    return w4a16_linear_ref(x, qweight, scales, bias, addend, **numbers, out_dtype=out_dtype)


def _on_cuda(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _check(x, qweight, scales, bias, addend, in_features, group_size, k_begin)
    if out_dtype not in (None, x.dtype, torch.float32):
        raise _refuse(f"output {out_dtype} from {x.dtype} activations; the kernel gives {x.dtype} or float32")
    numbers: dict[str, Any] = {"in_features": in_features, "group_size": group_size, "k_begin": k_begin}
    with torch.cuda.device(x.device):
        backend = cuda_backend(x.device.index)
        return run_linear(backend, x, qweight, scales, bias, addend, **numbers, out_dtype=out_dtype)


def _fake(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _check(x, qweight, scales, bias, addend, in_features, group_size, k_begin)
    return x.new_empty(
        (*x.shape[:-1], qweight.shape[0] * N_STEP), dtype=x.dtype if out_dtype is None else out_dtype
    )


_library.impl("w4a16_linear", _on_cpu, "CPU")
_library.impl("w4a16_linear", _on_cuda, "CUDA")
torch.library.register_fake("loopq::w4a16_linear", _fake, lib=_library)


def w4a16_linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    *,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x @ (s q)^T (+ bias) (+ addend)`` for int4 weights, as the operator ``loopq::w4a16_linear``.

    Parameters
    ----------
    x : torch.Tensor, bfloat16 or float16 (any floating type on the CPU), shape (..., width)
        Inputs ``k_begin .. k_begin + width`` of the layer; both ends multiples of 32. On a GPU: unit
        stride along
        the width, a uniform row stride that is a multiple of 8, 16-byte aligned.
    qweight : torch.Tensor, int32, shape (out / 16, ceil(in / 64) * 128)
        See `loopq.kernels.layout.pack_w4`.
    scales : torch.Tensor, float32, bfloat16 or float16, shape (ceil(in / group_size), out)
    bias : torch.Tensor or None, float32, shape (out,)
    addend : torch.Tensor or None, float32, shape (..., out)
        Joins the float32 sum before it is rounded.
    in_features : int
        Width of the whole layer, of which x may cover a part.
    group_size : int
        32, 64, 128 or a larger power of two; -1 for one scale per output.
    k_begin : int
        First input that x holds.
    out_dtype : torch.dtype or None
        x's type (default) or float32.

    Returns
    -------
    torch.Tensor, shape (..., out)

    Raises
    ------
    KernelError
        If a tensor has the wrong device, type, shape, stride or alignment, or the device is too old.
    MissingExtraError
        On a CUDA device without a matching CuPy.

    Notes
    -----
    Precision: codes exact, float32 sum per group, scale applied to that sum, float32 across groups, one
    rounding.
    Above `INT4_KERNEL_TOKENS` tokens on a GPU the weights ``s q`` are rounded to x's type first.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from loopq.kernels.layout import pack_w4
    >>> packed = torch.from_numpy(pack_w4(np.ones((16, 32), np.int8)))
    >>> w4a16_linear(torch.ones(1, 32), packed, torch.full((1, 16), 0.5), in_features=32, group_size=32)[0, 0]
    tensor(16.)
    """
    out: torch.Tensor = torch.ops.loopq.w4a16_linear(
        x, qweight, scales, bias, addend, in_features, group_size, k_begin, out_dtype
    )
    return out
