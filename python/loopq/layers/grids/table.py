"""Levels of a table, times their group's scale: docs/formats/levels.md."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grid import BlockType, Grid
from loopq.layers.grids import GRIDS, LEVELS
from loopq.storage.schema import between

#: A level is a whole number of these parts of a scale.
PARTS = 16
#: Tables for weights of language models, by bits: that of GGUF's IQ4_NL, and two fitted to SmolLM2's loop.
UNEVEN = {
    2: (-110, -20, 43, 127),
    3: (-124, -69, -34, -6, 18, 46, 79, 127),
    4: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}


class Leveled(Grid):
    """Codes that stand for ascending levels of a table, times the scale."""

    portable: ClassVar[bool] = False

    @abstractmethod
    def sixteenths(self) -> tuple[int, ...]:
        """Return the levels in sixteenths of the scale, from -127 to 127. Both signs occur."""

    @property
    def levels(self) -> NDArray[np.float32]:
        """Value of each code, in units of the scale."""
        return np.array(self.sixteenths(), dtype=np.float32) / np.float32(PARTS)

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return -self.offset, len(self.sixteenths()) - 1 - self.offset

    def _native(self) -> dict[str, Any]:
        return {"levels": list(self.sixteenths())}


@GRIDS.register("table")
@dataclass(frozen=True)
class Table(Leveled):
    """Codes of 2, 3 or 4 bits, stored as in `Integer`. Ascending codes stand for ascending levels, times the scale.

    Parameters
    ----------
    table : tuple of int
        Levels in sixteenths of the scale, from -127 to 127, of both signs.
    """

    #: A scale's sign selects the tail of the table for a group.
    signed: ClassVar[bool | None] = True
    table: tuple[Annotated[int, between(-127, 127)], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.core()

    def sixteenths(self) -> tuple[int, ...]:
        """The levels."""
        return self.table

    @property
    def label(self) -> str:
        """Name in reports."""
        return f"{self.bits} bits, uneven levels"

    @property
    def gguf(self) -> BlockType | None:
        """IQ4_NL."""
        return BlockType("IQ4_NL", 25, 42) if self.table == UNEVEN[4] else None

    def gguf_blocks(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> list[NDArray[np.uint8]]:
        """Return bytes of scales and codes. In GGUF a level is a whole multiple of the scale."""
        parts = scales / np.float32(PARTS)
        if (parts.astype(np.float16) != parts).any():
            raise CheckpointError("a scale that float16 cannot hold as sixteenths: it is below 2^-10")
        return super().gguf_blocks(codes, parts)


@LEVELS.register("uneven")
def uneven(bits: int, group_size: int, scale_dtype: str) -> Table:
    """Return the grid with the standard table for this number of bits."""
    return Table(bits, group_size, scale_dtype, _table(bits))


@LEVELS.register("fitted")
def fitted(bits: int, group_size: int, scale_dtype: str) -> Table:
    """Return a grid that fits a table to each weight."""
    return Fitted(bits, group_size, scale_dtype, _table(bits))


def _table(bits: int) -> tuple[int, ...]:
    if bits not in UNEVEN:
        raise ConfigError(f"uneven levels have {', '.join(map(str, UNEVEN))} bits; got {bits}")
    return UNEVEN[bits]


@dataclass(frozen=True)
class Fitted(Table):
    """A table that is not fitted yet. Fitted levels have the least squared error, weighted by the inputs' energy."""

    def fitted(
        self, weight: NDArray[np.float32], energies: NDArray[np.float64] | None, threads: int
    ) -> Table:
        """Return the table for one weight."""
        counts = np.ones(weight.shape[1]) if energies is None else energies
        levels = native.fit_levels(weight, counts, self.core(scale_search="mse"), threads=threads)
        return Table(
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"table": tuple(levels)}
        )
