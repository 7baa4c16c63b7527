"""The layout ``lq-cpu``: products with packed codes on the processor, by the native core.

Codes and scales of 32 outputs are stored side by side in the core's reading order. Codes on a trellis stay in their
streams and are decoded during the product. Activations become integers block by block, and sums of products are exact.
The result has the same bits for any instruction set, batch and number of threads (`docs/cpu.md`).
"""

from __future__ import annotations

import contextlib
import mmap
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

import loopq._native as native
from loopq.errors import KernelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loopq.runtime.layout import Held, PackedLayer

__all__ = ["CpuPanels"]

_LARGE = 2 << 20
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@lru_cache(maxsize=1024)
def _layout(held: Held, scale_dtype: torch.dtype) -> native.CpuLayout:
    grid = held.grid.core(scale_dtype=_DTYPES[scale_dtype])
    return native.CpuLayout(held.out_features, held.in_features, grid)


def _memory(n_bytes: int) -> torch.Tensor:
    """Bytes that begin on a cache line. Large ones use pages of 2 MiB if the system has them."""
    if n_bytes < _LARGE:
        return torch.empty(n_bytes, dtype=torch.uint8)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8))
    region = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a hint; without it the memory is only slower
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(region, np.uint8))


class CpuPanels:
    """Codes in the processor's order: any group size and width, with zero points or on a trellis."""

    devices: tuple[str, ...] = ("cpu",)

    def fits(self, held: Held) -> bool:
        """Whether it can hold such a layer."""
        return bool(held.grid.panels)

    def pack(
        self, held: Held, codes: NDArray[Any], scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> torch.Tensor:
        """Pack codes (out, in) with scales and zero points (groups, out) into one array of bytes."""
        layout = _layout(held, scales.dtype)
        packed = _memory(layout.n_bytes)
        points = None if zeros is None else np.ascontiguousarray(zeros.numpy().T)
        layout.pack(codes, scales.t().float().contiguous().numpy(), packed.numpy(), points)
        return packed

    def unpack(self, layer: PackedLayer) -> torch.Tensor:
        """Recover a layer's codes as int8 or uint8 (out, in)."""
        return torch.from_numpy(self.layout_of(layer).unpack(layer.qweight.numpy()))

    def rows(self, layer: PackedLayer, ids: torch.Tensor) -> torch.Tensor:
        """Codes of some outputs, (n, in)."""
        return torch.from_numpy(self.layout_of(layer).rows(layer.qweight.numpy(), ids.numpy()))

    def layout_of(self, layer: PackedLayer) -> native.CpuLayout:
        """Positions of a layer's codes and scales in its `qweight`."""
        return _layout(layer.held, layer.scales.dtype)

    def multiply(self, layer: PackedLayer, x: torch.Tensor) -> torch.Tensor:
        """``T x W^T + bias`` in x's type.

        Raises
        ------
        KernelError
            If a gradient would have to flow through it.
        """
        if x.requires_grad:
            if torch.is_grad_enabled():
                raise KernelError(
                    "products with packed codes have no gradient: call the model under torch.inference_mode(), or "
                    "load it with quantized=False"
                )
            x = x.detach()
        rows = x if layer.transform is None else layer.transform(x)
        if rows.dim() != 2:
            rows = rows.reshape(-1, rows.shape[-1])
        precision: Literal["int8", "fixed16", "fixed24"] = "fixed24"
        if rows.dtype == torch.bfloat16:
            rows, precision = rows.view(torch.uint16), "fixed16"
        elif rows.dtype != torch.float32:
            rows = rows.float()
        half = x.dtype == torch.bfloat16
        out = np.empty((rows.shape[0], layer.out_features), np.uint16 if half else np.float32)
        bound = _bound(layer)
        bound.layout.multiply(
            bound.packed, rows.numpy(), out, bound.bias,
            precision="int8" if layer.activations == "int8" else precision, threads=torch.get_num_threads(),
        )  # fmt: skip
        result = torch.from_numpy(out)
        if half:
            result = result.view(torch.bfloat16)
        elif x.dtype != torch.float32:
            result = result.to(x.dtype)
        return result if x.dim() == 2 else result.view(*x.shape[:-1], layer.out_features)


class _Bound(NamedTuple):
    """A layer's tensors in the core's form."""

    tensors: tuple[torch.Tensor | None, ...]
    layout: native.CpuLayout
    packed: NDArray[np.uint8]
    bias: NDArray[np.float32] | None


# Stored outside the layers, because layers are copied and pickled.
_BOUND: WeakKeyDictionary[PackedLayer, _Bound] = WeakKeyDictionary()


def _bound(layer: PackedLayer) -> _Bound:
    """Reuse the form while the layer's tensors exist, because making it takes longer than a small product."""
    bound, buffers = _BOUND.get(layer), layer._buffers
    tensors = (buffers["qweight"], buffers["scales"], buffers["bias"])
    if bound is None or any(a is not b for a, b in zip(bound.tensors, tensors, strict=True)):
        layout = _layout(layer.held, layer.scales.dtype)
        bias = None if layer.bias is None else layer.bias.numpy()
        bound = _BOUND[layer] = _Bound(tensors, layout, layer.qweight.numpy(), bias)
    return bound
