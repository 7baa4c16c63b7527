"""`QuantLinear`: a linear layer that holds codes and scales instead of a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import loopq._native as native
from loopq.errors import ConfigError
from loopq.kernels.layout import K_STEP, N_STEP, marlin_scales_to_rows
from loopq.kernels.plan import fold_of
from loopq.kernels.w4a16 import Product, spread_scales, w4a16_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["QuantLinear", "fits_kernel"]

_BITS = (2, 3, 4, 8)


def fits_kernel(out_features: int, in_features: int, group_size: int, bits: int) -> bool:
    """Whether the int4 kernel takes such a layer: 4 bits, out % 16, in % 32, a group size it has."""
    try:
        fold_of(group_size)
    except ConfigError:
        return False
    return bits == 4 and out_features % N_STEP == 0 and in_features % K_STEP == 0


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """The same values in 16 bits where that loses nothing, else float32."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales


class QuantLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Linear layer over symmetric codes and group scales.

    Built by `from_codes` or `from_marlin`. Int4 layers that fit the kernel hold the packed layout
    (``format == "lq-w4"``) and run it on a GPU; all others hold plain int8 codes (``format == "codes"``) and
    dequantise at each call, on any device.

    Attributes
    ----------
    qweight : torch.Tensor
        int32 (out / 16, ceil(in / 64) * 128), or int8 (out, in).
    scales : torch.Tensor, shape (groups, out)
        In 16 bits where that is exact, else float32.
    bias : torch.Tensor or None, float32, shape (out,)

    Notes
    -----
    The forward pass is ``x @ (s q)^T + bias`` with float32 sums and one rounding to x's type.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        in_features: int,
        group_size: int,
        bits: int,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = int(scales.shape[1])
        self.group_size = group_size
        self.bits = bits
        self.format = "lq-w4" if qweight.dtype == torch.int32 else "codes"
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    @classmethod
    def from_codes(
        cls,
        codes: NDArray[np.int8] | torch.Tensor,
        scales: NDArray[np.float32] | torch.Tensor,
        group_size: int,
        bits: int,
        bias: torch.Tensor | NDArray[Any] | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> QuantLinear:
        """A layer from native codes.

        Parameters
        ----------
        codes : int8, shape (out, in)
            In ``-2**(bits - 1) .. 2**(bits - 1) - 1``.
        scales : float32, shape (out, groups)
            ``groups = ceil(in / group_size)``, or 1 for ``group_size=-1``.
        group_size : int
            Inputs per scale; -1 for one scale per output.
        bits : int
            2, 3, 4 or 8.
        bias : shape (out,), or None
            Kept in float32.
        scale_dtype : torch.dtype or None
            Type to round the scales to; None keeps them exact, in 16 bits where possible.

        Raises
        ------
        ConfigError
            If shapes, codes or bits do not fit together.
        """
        q = np.ascontiguousarray(_to_numpy(codes))
        s = torch.from_numpy(np.array(_to_numpy(scales), dtype=np.float32))
        _check_codes(q, tuple(s.shape), group_size, bits)
        rows = s.t().contiguous()
        rows = _narrowest(rows) if scale_dtype is None else rows.to(scale_dtype)
        packed = fits_kernel(q.shape[0], q.shape[1], group_size, bits)
        weight = torch.from_numpy(native.w4_pack(q) if packed else q)
        kept = _bias(bias, q.shape[0])
        return cls(weight, rows, kept, in_features=q.shape[1], group_size=group_size, bits=bits)

    @classmethod
    def from_marlin(
        cls,
        words: NDArray[np.int32],
        scales: NDArray[Any],
        *,
        in_features: int,
        out_features: int,
        group_size: int,
        bias: torch.Tensor | None = None,
    ) -> QuantLinear:
        """A layer from a Marlin file's weight and scales: words are moved, nothing is requantised.

        Parameters
        ----------
        words : int32, shape (K / 16, 2 N)
        scales : shape (groups, N), Marlin's order
        in_features, out_features, group_size : int
            Of the layer, without the file's padding.

        Raises
        ------
        ConfigError
            If the file's arrays are too small for the layer, its padding is not zero, or its scales are of another
            group size.
        """
        packed = native.w4_from_marlin(np.ascontiguousarray(words), in_features, out_features)
        stored = 1 if group_size == -1 else -(-words.shape[0] * 16 // group_size)
        if scales.ndim != 2 or scales.shape[0] != stored:
            raise ConfigError(
                f"Marlin scales of shape {scales.shape}; {words.shape[0] * 16} inputs in groups of {group_size} have "
                f"{stored} rows"
            )
        rows = marlin_scales_to_rows(scales, group_size, in_features, out_features)
        return cls(
            torch.from_numpy(packed),
            torch.from_numpy(rows),
            _bias(bias, out_features),
            in_features=in_features,
            group_size=group_size,
            bits=4,
        )

    def codes(self) -> torch.Tensor:
        """The stored integers, int8, (out, in)."""
        if self.format == "codes":
            return self.qweight
        unpacked = native.w4_unpack(self.qweight.cpu().numpy(), self.in_features)
        return torch.from_numpy(unpacked).to(self.qweight.device)

    def dequantize(self) -> torch.Tensor:
        """``s q`` in float32, (out, in)."""
        return self.codes().float() * spread_scales(self.scales, self.in_features, self.group_size)

    def product(self, x: torch.Tensor) -> Product:
        """The packed layer's product with `x`."""
        return Product(x, self.qweight, self.scales, self.bias, None, self.in_features, self.group_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``x`` of shape (..., in); the result has x's type."""
        if self.format == "lq-w4":
            return w4a16_linear(
                x,
                self.qweight,
                self.scales,
                self.bias,
                in_features=self.in_features,
                group_size=self.group_size,
            )
        out = x.float() @ self.dequantize().t()
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantLinear:
        """Moves between devices, but keeps types: `model.bfloat16()` must not round the scales."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes over the stored type of the scales: copying into a narrower buffer would round them."""
        stored = state_dict.get(f"{prefix}scales")
        if stored is not None and stored.dtype != self.scales.dtype:
            self.scales = torch.empty_like(self.scales, dtype=stored.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, format={self.format!r}, bias={self.bias is not None}"
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


def _check_codes(codes: NDArray[Any], scales_shape: tuple[int, ...], group_size: int, bits: int) -> None:
    if bits not in _BITS:
        raise ConfigError(f"bits must be one of {_BITS}; got {bits}")
    if codes.ndim != 2 or codes.size == 0 or codes.dtype != np.int8:
        raise ConfigError(f"codes are {codes.dtype} of shape {codes.shape}; expected int8 (out, in)")
    if group_size != -1 and group_size <= 0:
        raise ConfigError(f"group_size must be positive, or -1 for one scale per output; got {group_size}")
    groups = 1 if group_size == -1 else -(-codes.shape[1] // group_size)
    if scales_shape != (codes.shape[0], groups):
        raise ConfigError(
            f"scales of shape {scales_shape}; expected {(codes.shape[0], groups)} (output by group)"
        )
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if codes.min() < low or codes.max() > high:
        raise ConfigError(f"{bits}-bit codes lie in {low}..{high}; got {codes.min()}..{codes.max()}")
