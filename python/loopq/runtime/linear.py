"""`QuantLinear`: a linear layer that holds codes and scales instead of a weight."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

import loopq._native as native
from loopq.errors import ConfigError, KernelError
from loopq.layers.grids.integer import Integer
from loopq.layers.grids.table import Leveled
from loopq.models.coded import Activations
from loopq.runtime.cpu import CpuPanels
from loopq.runtime.cuda.launch import Product
from loopq.runtime.cuda.layout import K_STEP, N_STEP
from loopq.runtime.cuda.plan import fold_of
from loopq.runtime.cuda.w4a16 import spread_scales, w4a16_linear
from loopq.runtime.layout import Held, Layout, PackedLayer
from loopq.runtime.transforms import InputTransform

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from loopq.layers.grid import Grid
    from loopq.layers.layer import QuantizedLayer

__all__ = ["LAYOUTS", "QuantLinear"]


class _Int4Tiles:
    """The int4 kernel's words: `loopq.runtime.cuda.layout`. Even levels or a table, out % 16, in % 32."""

    devices: tuple[str, ...] = ("cuda", "cpu", "meta")

    def fits(self, held: Held) -> bool:
        try:
            fold_of(held.grid.group_size)
        except ConfigError:
            return False
        plain = held.grid.bits == 4 and isinstance(held.grid, Integer | Leveled)
        return plain and held.out_features % N_STEP == 0 and held.in_features % K_STEP == 0

    def pack(
        self, held: Held, codes: NDArray[Any], scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.from_numpy(native.w4_pack(codes))

    def unpack(self, layer: PackedLayer) -> torch.Tensor:
        codes = native.w4_unpack(layer.qweight.cpu().numpy(), layer.in_features)
        return torch.from_numpy(codes).to(layer.qweight.device)

    def rows(self, layer: PackedLayer, ids: torch.Tensor) -> torch.Tensor:
        raise KernelError("the int4 kernel's words have no rows")

    def multiply(self, layer: PackedLayer, x: torch.Tensor) -> torch.Tensor:
        size = {"in_features": layer.in_features, "group_size": layer.group_size}
        inputs = x if layer.transform is None else layer.transform(x).to(x.dtype)
        return w4a16_linear(
            inputs, layer.qweight, layer.scales, layer.bias, levels=_sixteenths(layer.held.grid), **size
        )


def _sixteenths(grid: Grid) -> tuple[int, ...] | None:
    """The levels of the 16 codes that the int4 kernel stores. Codes that a grid lacks come first."""
    return (0,) * (8 - grid.offset) + grid.sixteenths() if isinstance(grid, Leveled) else None


class _PlainCodes:
    """One byte per code of a plain grid. Each call dequantizes the weight and drops it."""

    devices: tuple[str, ...] = ("cuda", "cpu", "meta")

    def fits(self, held: Held) -> bool:
        return held.grid.plain

    def pack(
        self, held: Held, codes: NDArray[Any], scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.from_numpy(codes)

    def unpack(self, layer: PackedLayer) -> torch.Tensor:
        return layer.qweight

    def rows(self, layer: PackedLayer, ids: torch.Tensor) -> torch.Tensor:
        return layer.qweight[ids]

    def multiply(self, layer: PackedLayer, x: torch.Tensor) -> torch.Tensor:
        inputs = x.float() if layer.transform is None else layer.transform(x)
        out = inputs @ layer.dequantize().t()
        if layer.bias is not None:
            out = out + layer.bias
        return out.to(x.dtype)


# Without a given layout, a layer takes the first that fits.
LAYOUTS: dict[str, Layout] = {"lq-w4": _Int4Tiles(), "codes": _PlainCodes(), "lq-cpu": CpuPanels()}


def _first_fit(held: Held, device: str, dtype: torch.dtype) -> str:
    for name, layout in LAYOUTS.items():
        if device not in layout.devices or not layout.fits(held):
            continue
        if name == "lq-w4" and device == "cuda" and dtype == torch.float32:
            warnings.warn(
                "the int4 kernel takes activations of 16 bits: layers of a float32 model are dequantized at each call; "
                "move it as bfloat16 for the kernel",
                stacklevel=2,
            )
            continue
        return name
    raise ConfigError(
        f"products with codes of {held.grid.label} run on the processor, not on {device!r}: leave the model there, or "
        "load it with quantized=False"
    )


class _Weight(torch.Tensor):  # type: ignore[misc]  # torch is untyped here
    """A layer's weight with only shape, type and device until an operation needs its numbers."""

    @staticmethod
    def __new__(cls, layer: QuantLinear) -> _Weight:
        """Make one for a layer."""
        shape = layer.out_features, layer.in_features
        weight: _Weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=layer.dtype, device=layer.scales.device
        )
        weight._layer = layer
        return weight

    _layer: QuantLinear

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation with the numbers."""
        args, kwargs = tree_map_only(cls, lambda w: w._layer.plain_weight(), (args, kwargs or {}))
        return func(*args, **kwargs)


class QuantLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Linear layer over integer codes and group scales.

    Built by `from_layer`.

    Attributes
    ----------
    layout : str
        Key of `LAYOUTS`. ``"lq-w4"`` has the int4 kernel's words for a GPU. ``"codes"`` has one byte per code,
        dequantized at each call, on any device. ``"lq-cpu"`` has codes and scales for the processor. Moving such a
        layer to a GPU repacks it.
    activations : str
        ``"float"``, or ``"int8"`` for W4A8 (``"lq-cpu"`` only).
    qweight : torch.Tensor
        int32 (out / 16, ceil(in / 64) * 128), int8 or uint8 (out, in), or uint8 (bytes,).
    scales : torch.Tensor, shape (groups, out)
        16 bits if exact, else float32.
    zeros : uint8 or float32 torch.Tensor of shape (groups, out), or None
        Zero points of an asymmetric grid, or offsets of a GGUF type.
    bias : torch.Tensor or None, float32, shape (out,)
    transform : InputTransform or None
    dtype : torch.dtype
        Type of the replaced weight.

    Notes
    -----
    ``y = (T x) @ (s (u - z))^T + bias`` with float32 sums and one rounding to x's type. Without a transform T is the
    identity. Without zero points z is zero.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    levels: torch.Tensor | None

    def __init__(
        self,
        layout: str,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        *,
        held: Held,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        transform: InputTransform | None = None,
    ) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.layout, self.held = layout, held
        self.activations: Activations = "float"
        self.in_features, self.out_features = held.in_features, held.out_features
        self.group_size, self.bits = held.grid.group_size, held.grid.bits
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", bias)
        levels = held.grid.levels if held.grid.plain else None
        self.register_buffer("levels", None if levels is None else torch.from_numpy(levels), persistent=False)
        self.transform = transform

    @property
    def weight(self) -> torch.Tensor:
        """Weight (out, in) for the plain input, for models that read its type or multiply by it without a call.

        Its numbers are computed at each use.
        """
        return _Weight(self)

    def plain_weight(self) -> torch.Tensor:
        """Product with the unit matrix: the weight for the plain input in the type of the replaced one."""
        product = self(torch.eye(self.in_features, device=self.scales.device))
        plain = product if self.bias is None else product - self.bias
        return plain.t().to(self.dtype)

    @classmethod
    def from_layer(
        cls,
        layer: QuantizedLayer,
        bias: torch.Tensor | NDArray[Any] | None = None,
        *,
        scale_dtype: torch.dtype | None = None,
        layout: str | None = None,
        activations: Activations = "float",
    ) -> QuantLinear:
        """A module that multiplies by a layer's codes.

        Parameters
        ----------
        layer : QuantizedLayer
            The layer. Its transform, if any, is applied to the input at each call.
        bias : shape (out,), or None
            Kept in float32.
        scale_dtype : torch.dtype or None
            Type to round the scales to. None keeps them exact, in 16 bits if possible.
        layout : str or None
            Key of `LAYOUTS`. None takes the first that fits and also runs on a GPU.
        activations : "float" or "int8"
            "int8" rounds activations to 8 bits with one scale per token and group (W4A8), in ``"lq-cpu"`` only.

        Raises
        ------
        ConfigError
            If the layer's arrays do not fit its grid, its transform is unknown, or the layout does not support the
            layer or its activations.
        """
        layer.grid.check(layer.codes, layer.scales, layer.zeros)
        codes = np.ascontiguousarray(layer.codes)
        rows = torch.from_numpy(np.array(layer.scales, dtype=np.float32)).t().contiguous()
        held = Held(*layer.shape, layer.grid)
        if layout is None:
            layout = _first_fit(held, "cpu", torch.float32)
        elif layout not in LAYOUTS or not LAYOUTS[layout].fits(held):
            raise ConfigError(f"layout {layout!r} does not take {held}; there are {', '.join(LAYOUTS)}")
        rows = _narrowest(rows) if scale_dtype is None else rows.to(scale_dtype)
        points = None if layer.zeros is None else torch.from_numpy(layer.zeros.T.copy())
        return cls(
            layout,
            LAYOUTS[layout].pack(held, codes, rows, points),
            rows,
            held=held,
            zeros=points,
            bias=_bias(bias, layer.shape[0]),
            transform=None if layer.transform is None else InputTransform(layer.transform),
        ).rounding(activations)

    def codes(self) -> torch.Tensor:
        """The stored integers as int8 or uint8 (out, in)."""
        return LAYOUTS[self.layout].unpack(self)

    def dequantize(self) -> torch.Tensor:
        """``s (u - z)`` in float32, (out, in): the weight for the transformed input.

        On a trellis the value of the codes' state replaces ``u - z``.
        """
        if not self.held.grid.plain:
            scales = self.scales.t().float().contiguous().numpy()
            return torch.from_numpy(self.held.grid.dequantize(self.codes().numpy(), scales))
        return self._values(self.codes(), slice(None))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows (n, in) of `dequantize` for int64 row numbers (n,). The layer has a plain grid."""
        return self._values(LAYOUTS[self.layout].rows(self, ids), ids)

    def _values(self, codes: torch.Tensor, outputs: torch.Tensor | slice) -> torch.Tensor:
        weight = codes.float() if self.levels is None else self.levels[codes.long() + self.held.grid.offset]
        points = None
        if self.zeros is not None:
            points = spread_scales(self.zeros[:, outputs], self.in_features, self.group_size)
        offsets = self.zeros is not None and self.zeros.is_floating_point()
        if points is not None and not offsets:
            weight = weight - points
        weight = weight * spread_scales(self.scales[:, outputs], self.in_features, self.group_size)
        return weight + points if offsets else weight

    def product(self, x: torch.Tensor) -> Product:
        """The operands of the int4 kernel for a layer in its layout."""
        operands = x, self.qweight, self.scales, self.bias, None, self.in_features, self.group_size
        return Product(*operands, levels=_sixteenths(self.held.grid))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``x`` of shape (..., in). The result has x's type."""
        return LAYOUTS[self.layout].multiply(self, x)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantLinear:
        """Moves between devices but keeps types, because `model.bfloat16()` must not round the scales."""
        device = fn(self.scales).device.type
        if device not in LAYOUTS[self.layout].devices:
            dtype = fn(torch.empty(0, dtype=self.dtype, device=self.scales.device)).dtype
            self._repack(_first_fit(self.held, device, dtype))

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.scales.device)).dtype
        return self

    def rounding(self, activations: Activations) -> QuantLinear:
        """Return the layer with unchanged inputs ("float") or inputs rounded to 8 bits ("int8")."""
        if activations not in ("float", "int8"):
            raise ConfigError(f"activations must be 'float' or 'int8'; got {activations!r}")
        self.activations = activations
        self._check_activations(self.layout)
        return self

    def _check_activations(self, layout: str) -> None:
        if self.activations == "int8" and layout != "lq-cpu":
            raise ConfigError(
                f"activations='int8' runs on the processor, in layout 'lq-cpu'; the layer would be in {layout!r}: "
                f"keep the model on the CPU, or take activations='float'"
            )

    def _repack(self, layout: str) -> None:
        self._check_activations(layout)
        self.qweight = LAYOUTS[layout].pack(self.held, self.codes().numpy(), self.scales, self.zeros)
        self.layout = layout

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes over the stored type of the scales, because copying into a narrower buffer would round them."""
        stored = state_dict.get(f"{prefix}scales")
        if stored is not None and stored.dtype != self.scales.dtype:
            self.scales = torch.empty_like(self.scales, dtype=stored.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, grid={self.held.grid}, "
            f"layout={self.layout!r}, "
            f"activations={self.activations!r}, bias={self.bias is not None}"
        )


def _bias(bias: torch.Tensor | NDArray[Any] | None, out_features: int) -> torch.Tensor | None:
    if bias is None:
        return None
    kept = torch.from_numpy(np.array(_to_numpy(bias), dtype=np.float32))
    if tuple(kept.shape) != (out_features,):
        raise ConfigError(f"bias of shape {tuple(kept.shape)}; expected ({out_features},)")
    return kept


def _to_numpy(array: Any) -> Any:
    if not isinstance(array, torch.Tensor):
        return np.asarray(array)
    array = array.detach().cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """The same values in 16 bits if that is exact, else float32."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales
