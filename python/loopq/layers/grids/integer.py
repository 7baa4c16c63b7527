"""Signed integers times their group's scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.layers.grid import BlockType, Grid
from loopq.layers.grids import GRIDS

_BLOCKS = {2: BlockType("Q2_0", 41, 20), 4: BlockType("Q4_0", 2, 41), 8: BlockType("Q8_0", 7, 80)}


@GRIDS.register("integer")
@dataclass(frozen=True)
class Integer(Grid):
    """Codes in [-2^(b-1), 2^(b-1) - 1] without zero points: code * scale."""

    @property
    def gguf(self) -> BlockType | None:
        """Q2_0, Q4_0 or Q8_0."""
        return _BLOCKS.get(self.bits)

    @property
    def gguf_width(self) -> int:
        """Weights of a block."""
        return 64 if self.bits == 2 else 32

    def gguf_blocks(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> list[NDArray[np.uint8]]:
        """Return bytes of scales and codes. Q2_0 has codes from -1 to 2, so codes and scales change sign."""
        if self.bits != 2:
            return super().gguf_blocks(codes, scales)
        turned = (1 - codes).astype(np.uint8).reshape(*codes.shape[:2], -1, 4) << np.arange(
            0, 8, 2, dtype=np.uint8
        )
        return [super().gguf_blocks(codes, -scales)[0], np.bitwise_or.reduce(turned, axis=-1)]
