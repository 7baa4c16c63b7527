"""Signed integers times the scale of their group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from loopq.layers.grid import Grid
from loopq.layers.grids import GRIDS


@GRIDS.register("integer")
@dataclass(frozen=True)
class Integer(Grid):
    """Codes in [-2^(b-1), 2^(b-1) - 1] without zero points: code * scale."""

    name: ClassVar[str] = "integer"

    @classmethod
    def holds(cls, symmetric: bool, more: Mapping[str, Any]) -> bool:
        """Symmetric codes and nothing else."""
        return symmetric and not more

    @property
    def gguf(self) -> str | None:
        """Q4_0 or Q8_0."""
        return f"Q{self.bits}_0" if self.bits in (4, 8) else None
