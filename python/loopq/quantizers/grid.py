"""Settings of the grid that a layer is quantized to."""

from __future__ import annotations

from dataclasses import dataclass

from loopq.errors import ConfigError
from loopq.layers.grid import PER_CHANNEL, SIGNIFICANT_BITS, Bits, Grid, ScaleType
from loopq.layers.grids import LEVELS, even
from loopq.settings.declare import Settings, setting

#: Levels that the method and the format decide.
AUTO = "auto"
#: Levels of whole numbers, and of what nothing has decided.
EVEN = ("even", AUTO)
#: Levels that no other program has, where the grid has its own codes: those of tables, and even ones on a trellis.
OWN_LEVELS = (*EVEN, "uneven", "fitted")


@dataclass(frozen=True)
class GridSettings(Settings):
    """Grid of the codes.

    Parameters
    ----------
    bits : {2, 3, 4, 8}
        Bits of a code.
    group_size : int
        Input columns that share a scale; -1: one scale per output row. A shorter last group has its own scale, from its
        real columns.
    symmetric : bool
        Signed codes without a zero point; else unsigned codes, with a zero point for each group.
    levels : str
        Values of the codes, in units of the scale. `even` has whole numbers. The other names have values, and often
        bits and groups, of their own (docs/formats/levels.md). `auto` is `uneven` with method gptq-cd in loopq's own
        format for symmetric codes of 2, 3 or 4 bits. Elsewhere it is `even`.
    scale_dtype : {"float32", "float16", "bfloat16"}
        Stored type of the scales. Scales are rounded to it before any code is computed.
    scale_bits : int, optional
        Significant bits of a scale, including the leading one; all of the type when absent. With 5, the product of a
        symmetric INT4 code and its scale is exact in bfloat16 (docs/formats/scales.md).
    """

    bits: Bits = setting(4, common=True)
    group_size: int = setting(128, common=True)
    symmetric: bool = setting(True)
    levels: str = setting(AUTO, names=LEVELS)
    scale_dtype: ScaleType = setting("float16")
    scale_bits: int | None = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise ConfigError(f"group_size must be -1 (per channel) or at least 1; got {self.group_size!r}")
        if self.levels not in EVEN:
            if not self.symmetric:
                raise ConfigError(
                    f"levels {self.levels!r} have no zero points: leave --set symmetric=false out"
                )
            self._check_levels(self.make())
        most = SIGNIFICANT_BITS[self.scale_dtype]
        if self.scale_bits is not None and not 1 <= self.scale_bits <= most:
            raise ConfigError(
                f"scale_bits must be between 1 and {most}, the significant bits of {self.scale_dtype}; "
                f"got {self.scale_bits!r}"
            )

    def _check_levels(self, grid: Grid) -> None:
        """Refuse bits and groups that differ from those of the level type."""
        for name in ("bits", "group_size"):
            fixed, asked = getattr(grid, name), getattr(self, name)
            if asked not in (fixed, getattr(GridSettings, name)):
                raise ConfigError(
                    f"levels {self.levels!r} has {grid.bits} bits and groups of {grid.group_size}; got {name} "
                    f"{asked}: leave --{name.replace('_', '-')} away"
                )

    def make(self) -> Grid:
        """Return the grid of the codes."""
        if self.levels not in EVEN:
            return LEVELS.get(self.levels)(self.bits, self.group_size, self.scale_dtype)
        return even(
            bits=self.bits, group_size=self.group_size, symmetric=self.symmetric, scale_dtype=self.scale_dtype
        )
