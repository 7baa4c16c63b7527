"""Codes on a trellis: a value depends on several codes of its column (docs/formats/trellis.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from loopq.errors import ConfigError
from loopq.layers.grid import Grid
from loopq.layers.grids import GRIDS
from loopq.storage.schema import Positive, between


@dataclass(frozen=True)
class Trellis:
    """Values of codes on a trellis, where a value depends on several codes (docs/formats/trellis.md).

    Parameters
    ----------
    state_bits : int
        Bits of a stream that a value depends on. They form its state.
    stream_rows : int
        Outputs of one column in a stream, before the next stream begins.
    function : {"1mad"}
        Value of a state x. It is the sum of the bytes of 34038481 x + 76625530 mod 2^32, minus 510, over 128.
    """

    state_bits: Annotated[int, between(4, 16)]
    stream_rows: Positive
    function: Literal["1mad"] = "1mad"


@GRIDS.register("trellis")
@dataclass(frozen=True)
class OnTrellis(Grid):
    """Codes of 2, 3 or 4 bits, stored as in `Integer`: the value of a state times the scale.

    Parameters
    ----------
    trellis : Trellis
        Definition of the states and their values.
    """

    trellis: Trellis

    plain: ClassVar[bool] = False
    portable: ClassVar[bool] = False
    instead: ClassVar[str] = "without --method trellis"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == 8 or self.trellis.state_bits < self.bits + 2:
            raise ConfigError(f"{self.trellis} for {self.bits} bits")

    @property
    def label(self) -> str:
        """Name in reports."""
        return f"INT{self.bits} on a trellis"

    def _native(self) -> dict[str, Any]:
        return {"trellis": (self.trellis.state_bits, self.trellis.stream_rows)}
