"""The int4 product as a torch operator: checks, launch, reference and registration.

Importing this module needs torch. CuPy is needed at the first call on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from loopq.quantizers.cuda.load import Backend, cuda_backend
from loopq.runtime.cuda.launch import (
    Product,
    Workspace,
    launch_dequantize,
    launch_gemm,
    refuse,
    workspace_size,
)
from loopq.runtime.cuda.layout import N_STEP, TILE_K

# Above this many tokens an int4 weight is dequantised for cuBLAS, which is faster on an H200 from 192 tokens
# (docs/kernels.md).
INT4_KERNEL_TOKENS = 128
_DEVICES = ("cpu", "cuda", "meta")


def _rows(x: torch.Tensor, what: str) -> torch.Tensor:
    """View x as (rows, width) with unit stride along the width, without a copy.

    Raises
    ------
    KernelError
        If the strides do not allow this view.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise refuse(
            f"{what} has stride {x.stride(-1)} along its last dimension; the kernel needs 1: .contiguous()"
        )
    if x.dim() == 1:
        return x.unsqueeze(0)
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError as error:
        raise refuse(
            f"{what} of shape {tuple(x.shape)} and strides {x.stride()} has no uniform row stride: "
            f".contiguous()"
        ) from error


def dequantize_packed(p: Product) -> torch.Tensor:
    """s * q of a product's weight as float32 (out_features, in_features), with torch operations on any device."""
    strips = p.qweight.shape[0]
    words = p.qweight.view(strips, -1, 8, 4, 4)  # tile, column, pair, step
    tiles = words.shape[1]
    even = torch.arange(-8.0, 8.0, device=words.device)
    values = even if p.levels is None else torch.tensor(p.levels, device=words.device) / 16
    codes = values.new_empty((strips, 2, 8, tiles, 4, 2, 4, 2))
    for half in range(2):
        for high in range(2):
            for odd in range(2):
                nibble = (words >> (4 * (2 * half + high + 4 * odd))) & 15
                codes[:, half, :, :, :, high, :, odd] = values[nibble.permute(0, 2, 1, 4, 3)]
    weight = codes.view(strips * N_STEP, tiles * TILE_K)[:, : p.in_features]
    return weight * spread_scales(p.scales, p.in_features, p.group_size)


def spread_scales(scales: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor:
    """Expand scales (groups, out) to float32 (out, in), one per input. The last group may be short."""
    if group_size == -1:
        return scales.float().t()
    return scales.float().t().repeat_interleave(group_size, dim=1)[:, :in_features]


def w4a16_linear_ref(p: Product) -> torch.Tensor:
    """Reference version of the kernel: float32 weights, float32 product, one rounding at the end."""
    weight = dequantize_packed(p)
    out = p.x.float() @ weight[:, p.k_begin : p.k_begin + p.width].t()
    if p.bias is not None:
        out = out + p.bias
    if p.addend is not None:
        out = out + p.addend
    return out.to(p.dtype)


_COUNTERS: dict[tuple[int, int], torch.Tensor] = {}


def _eager_workspace(
    backend: Backend, layer: tuple[int, int, int, int], rows: int, device: torch.device
) -> Workspace:
    floats, pairs = workspace_size(backend, layer, rows)
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed next to any work, so it gets its own counters, zeroed in each replay.
        return Workspace.allocate(floats, pairs, device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    counters = _COUNTERS.get(key)
    if counters is None or counters.numel() < pairs:
        counters = _COUNTERS[key] = torch.zeros(max(pairs, 4096), dtype=torch.int32, device=device)
    return Workspace(torch.empty(max(floats, 1), dtype=torch.float32, device=device), counters)


def run_linear(backend: Backend, p: Product, workspace: Workspace | None = None) -> torch.Tensor:
    """The product on a backend. Above INT4_KERNEL_TOKENS tokens it dequantises and multiplies."""
    rows = _rows(p.x, "x")
    addend = None if p.addend is None else _rows(p.addend, "addend")
    out = torch.empty((rows.shape[0], p.out_features), dtype=p.dtype, device=rows.device)
    if rows.shape[0] > INT4_KERNEL_TOKENS:
        out.copy_(_multiply_dequantized(backend, p, rows, addend))
    elif rows.shape[0] > 0:
        space = workspace or _eager_workspace(backend, p.layer, rows.shape[0], rows.device)
        launch_gemm(backend, replace(p, x=rows, addend=addend), out, space)
    return out.view(*p.x.shape[:-1], p.out_features)


def _multiply_dequantized(
    backend: Backend, p: Product, rows: torch.Tensor, addend: torch.Tensor | None
) -> torch.Tensor:
    weight = torch.empty((p.out_features, p.in_features), dtype=rows.dtype, device=rows.device)
    launch_dequantize(backend, p, weight)
    product = torch.nn.functional.linear(rows, weight[:, p.k_begin : p.k_begin + p.width])
    if p.bias is None and addend is None:
        return product
    return product.float() + (0 if p.bias is None else p.bias) + (0 if addend is None else addend)


_SCHEMA = (
    "w4a16_linear(Tensor x, Tensor qweight, Tensor scales, Tensor? bias, Tensor? addend, int in_features, "
    "int group_size, int k_begin=0, ScalarType? out_dtype=None, int[]? levels=None) -> Tensor"
)
_library = torch.library.Library("loopq", "FRAGMENT")
_library.define(_SCHEMA)


# Arguments have the schema's order, which is the order of Product's fields.
def _on_cpu(*operands: Any) -> torch.Tensor:
    return w4a16_linear_ref(Product(*operands).checked())


def _on_cuda(*operands: Any) -> torch.Tensor:
    product = Product(*operands).checked()
    with torch.cuda.device(product.x.device):
        return run_linear(cuda_backend(product.x.device.index), product)


def _fake(*operands: Any) -> torch.Tensor:
    product = Product(*operands).checked()
    return product.x.new_empty((*product.x.shape[:-1], product.out_features), dtype=product.dtype)


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
    levels: Sequence[int] | None = None,
) -> torch.Tensor:
    """``x @ (s q)^T (+ bias) (+ addend)`` for int4 weights, as the operator ``loopq::w4a16_linear``.

    Parameters
    ----------
    x : torch.Tensor, bfloat16 or float16 (any floating type on the CPU), shape (..., width)
        Inputs ``k_begin .. k_begin + width``, multiples of 32. A GPU needs unit stride along the width, 16-byte
        alignment, and a uniform row stride that is a multiple of 8.
    qweight : torch.Tensor, int32, shape (out / 16, ceil(in / 64) * 128)
        See `loopq.runtime.cuda.layout.pack_w4`.
    scales : torch.Tensor, float32, bfloat16 or float16, shape (ceil(in / group_size), out)
    bias, addend : torch.Tensor or None, float32, shapes (out,) and (..., out)
        Added to the float32 sum before it is rounded.
    in_features, k_begin : int
        Width of the whole layer, and the first input in x, which may cover a part of it.
    group_size : int
        32, 64, 128 or a larger power of two. -1 for one scale per output.
    out_dtype : torch.dtype or None
        x's type (default) or float32.
    levels : sequence of 16 int or None
        Levels of a table in sixteenths of the scale, from -127 to 127, in the order of the codes.

    Raises
    ------
    KernelError, MissingExtraError
        A tensor has the wrong device, type, shape, stride or alignment; the device is too old, or has no CuPy.

    Notes
    -----
    Codes are exact. Sums of groups are scaled and added in float32, and the result is rounded once. Above
    `INT4_KERNEL_TOKENS` tokens on a GPU, ``s q`` is rounded to x's type first.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from loopq.runtime.cuda.layout import pack_w4
    >>> packed = torch.from_numpy(pack_w4(np.ones((16, 32), np.int8)))
    >>> w4a16_linear(torch.ones(1, 32), packed, torch.full((1, 16), 0.5), in_features=32, group_size=32)[0, 0]
    tensor(16.)
    """
    if x.device.type not in _DEVICES:
        known = ", ".join(_DEVICES)
        raise refuse(f"x is on {x.device}; there are implementations for {known}: move x and the layer")
    out: torch.Tensor = torch.ops.loopq.w4a16_linear(
        x, qweight, scales, bias, addend, in_features, group_size, k_begin, out_dtype, levels
    )
    return out
