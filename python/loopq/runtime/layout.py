"""Interface between layouts of packed codes and their layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loopq.layers.grid import Grid
    from loopq.models.coded import Activations
    from loopq.runtime.transforms import InputTransform

__all__ = ["Held", "Layout", "PackedLayer"]


@dataclass(frozen=True)
class Held:
    """Properties of a layer that decide which layouts can hold it."""

    out_features: int
    in_features: int
    grid: Grid


class PackedLayer(Protocol):
    """Attributes that a layout reads of a layer with its codes."""

    held: Held
    qweight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    transform: InputTransform | None
    activations: Activations
    in_features: int
    out_features: int
    group_size: int
    _buffers: dict[str, torch.Tensor | None]

    def dequantize(self) -> torch.Tensor:
        """Return the weight in float32, (out, in)."""


class Layout(Protocol):
    """Memory layout of codes, with its product routine. It holds no tensors.

    Another backend is another entry of `loopq.runtime.linear.LAYOUTS`. No other code knows how codes are stored.
    """

    devices: tuple[str, ...]
    """Types of device that it can multiply on."""

    def fits(self, held: Held) -> bool:
        """Whether it can hold such a layer."""

    def pack(
        self, held: Held, codes: NDArray[Any], scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> torch.Tensor:
        """Pack stored int8 or uint8 codes (out, in) with scales and zero points (groups, out)."""

    def unpack(self, layer: PackedLayer) -> torch.Tensor:
        """Recover a layer's codes as int8 or uint8 (out, in)."""

    def rows(self, layer: PackedLayer, ids: torch.Tensor) -> torch.Tensor:
        """Codes of some outputs, (n, in)."""

    def multiply(self, layer: PackedLayer, x: torch.Tensor) -> torch.Tensor:
        """``T x W^T + bias`` in x's type, with float32 sums and one rounding."""
