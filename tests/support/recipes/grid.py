"""The recipe of CONTRIBUTING for a grid: one file for `loopq/layers/grids`. Nothing here imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.layers.grid import BlockType, Grid
from loopq.layers.grids import GRIDS, LEVELS
from loopq.layers.grids.table import PARTS, Leveled


@GRIDS.register("madeup")
@dataclass(frozen=True)
class MadeUpGrid(Leveled):
    """Minus, nothing or plus a scale, in codes of 2 bits. GGUF calls such blocks TQ2_0.

    Parameters
    ----------
    tint : int
        A field of the kind alone, which files store.
    """

    tint: int

    signed: ClassVar[bool | None] = False
    instead: ClassVar[str] = "with --levels even, or with the format madeup"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != 2:
            raise ConfigError(f"levels madeup have 2 bits; got {self.bits}: give --bits 2")

    def sixteenths(self) -> tuple[int, ...]:
        """The levels."""
        return (-PARTS, 0, PARTS)

    @property
    def label(self) -> str:
        """Name in reports."""
        return "MADEUP"

    @property
    def panels(self) -> bool:
        """Whether the CPU layout supports such codes."""
        return False

    @property
    def gguf(self) -> BlockType:
        """TQ2_0."""
        return BlockType("TQ2_0", 37, 22)

    @property
    def gguf_width(self) -> int:
        """Weights of a block."""
        return 256

    def gguf_blocks(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> list[NDArray[np.uint8]]:
        """Return codes and scales. A byte has four codes that are 32 apart."""
        apart = (codes + self.offset).astype(np.uint8).reshape(*codes.shape[:2], -1, 4, 32)
        bits = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        packed = np.bitwise_or.reduce(apart << bits, axis=-2).reshape(*codes.shape[:2], -1)
        return [packed, np.ascontiguousarray(scales, "<f2").reshape(*scales.shape, 1).view(np.uint8)]


@LEVELS.register("madeup")
def madeup(bits: int, group_size: int, scale_dtype: str) -> Grid:
    """Return the grid of these bits and groups."""
    return MadeUpGrid(bits, group_size, scale_dtype, tint=3)
