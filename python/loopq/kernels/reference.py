"""`PackedLinear`: a linear layer that keeps its packed codes, for everything that `QuantLinear` does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopq.errors import ConfigError
from loopq.rotation import ChannelScale, Rotation, Transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["PackedLinear"]

_WORD = 32


def unpack_stream(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Read `count` codes of `bits` bits from each row of a bit stream, on any device.

    Parameters
    ----------
    words : torch.Tensor, int32, shape (rows, ceil(count * bits / 32))
        Code `j` in bits `j * bits` to `(j + 1) * bits` of its row, the lowest bit first.
    bits, count : int
        Bits of a code and codes of a row.

    Returns
    -------
    torch.Tensor, int32, shape (rows, count)
        From 0 to 2^bits - 1.
    """
    at = torch.arange(count, device=words.device) * bits
    first, shift = at // _WORD, at % _WORD
    # A code of 3 bits may begin in one word and end in the next one.
    last = ((at + bits - 1) // _WORD).clamp_max(words.shape[1] - 1)
    wide = words.long() & 0xFFFFFFFF
    both = wide[:, first] | (wide[:, last] << _WORD) * (last > first)
    return ((both >> shift) & ((1 << bits) - 1)).int()


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Reference layer over packed codes: any bits, zero points, and a change of the input's basis.

    Parameters
    ----------
    packed : ndarray, int32, shape (out, ceil(in * bits / 32))
        Unsigned codes `u` as a bit stream along each row.
    scales : ndarray, float32, shape (out, groups)
        Kept exactly, in 16 bits where that loses nothing.
    zeros : ndarray, uint8, shape (out, groups)
        Zero points `z`; 2^(bits - 1) everywhere for a symmetric layer.
    in_features, group_size, bits : int
        `group_size` -1 is one scale per row.
    bias : torch.Tensor or None, shape (out,)
        Kept in float32.
    transform : Transform or None
        Change of the input's basis that the codes are for; applied to the input at each call.

    Raises
    ------
    ConfigError
        Shapes that do not fit together, or a transform of an unknown kind.

    Notes
    -----
    ``y = (T x) @ (s (u - z))^T + bias``; sums in float32, one rounding to x's type at the end. The weight is
    unpacked at each call and forgotten: memory is that of the file, time is not what this layer is for.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        packed: NDArray[np.int32],
        scales: NDArray[np.float32],
        zeros: NDArray[np.uint8],
        *,
        in_features: int,
        group_size: int,
        bits: int,
        bias: torch.Tensor | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, int(packed.shape[0])
        self.group_size, self.bits = group_size, bits
        self.width = in_features if group_size == -1 else group_size
        groups = -(-in_features // self.width)
        expected = ((self.out_features, -(-in_features * bits // _WORD)), (self.out_features, groups))
        if (packed.shape, scales.shape) != expected or zeros.shape != scales.shape:
            raise ConfigError(
                f"packed codes of shape {packed.shape}, scales {scales.shape}, zero points {zeros.shape}; expected "
                f"{expected[0]}, {expected[1]} and {expected[1]}"
            )
        self.register_buffer("packed", torch.from_numpy(np.array(packed, dtype=np.int32)))
        self.register_buffer("scales", _narrowest(torch.from_numpy(np.array(scales, dtype=np.float32))))
        self.register_buffer("zeros", torch.from_numpy(np.array(zeros, dtype=np.uint8)))
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.transform = transform
        self._register_transform(transform)

    def _register_transform(self, transform: Transform | None) -> None:
        if transform is None:
            return
        if isinstance(transform, ChannelScale):
            self.register_buffer("input_scale", torch.from_numpy(np.array(transform.scale, dtype=np.float32)))
        elif isinstance(transform, Rotation):
            for size in sorted(set(transform.sizes())):
                block = torch.from_numpy(transform.matrix(size).T.astype(np.float32))
                # Made anew from its description: a saved state needs no copy.
                self.register_buffer(f"rotation_{size}", block.contiguous(), persistent=False)
        else:
            raise ConfigError(f"no module applies an input transform of type {type(transform).__name__}")

    def stored_weight(self) -> torch.Tensor:
        """``s (u - z)`` for the transformed input, float32, (out, in)."""
        columns = torch.arange(self.in_features, device=self.packed.device) // self.width
        codes = unpack_stream(self.packed, self.bits, self.in_features)
        steps = codes - self.zeros.int()[:, columns]
        return steps.float() * self.scales.float()[:, columns]

    def transformed(self, x: torch.Tensor) -> torch.Tensor:
        """T x along the last axis, float32."""
        x = x.float()
        if isinstance(self.transform, ChannelScale):
            return x / self.input_scale
        if isinstance(self.transform, Rotation):
            sizes = self.transform.sizes()
            blocks = [getattr(self, f"rotation_{size}") for size in sizes]
            parts = x.split(sizes, dim=-1)
            return torch.cat([part @ block for part, block in zip(parts, blocks, strict=True)], dim=-1)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``x`` of shape (..., in); the result has x's type."""
        out = torch.nn.functional.linear(self.transformed(x), self.stored_weight(), self.bias)
        return out.to(x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        """Moves between devices, but keeps types: `model.bfloat16()` must not round the scales."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        return self

    def extra_repr(self) -> str:
        """What the layer holds, for `print(model)`."""
        kind = "none" if self.transform is None else str(self.transform.describe()["type"])
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, transform={kind}, bias={self.bias is not None}"
        )


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        narrow: Any = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales
