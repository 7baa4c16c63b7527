"""The grid that codes live on: bits, groups, zero points, and the stored type of scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from loopq.errors import ConfigError
from loopq.settings.declare import Settings, setting

Bits = Literal[2, 3, 4, 8]
ScaleType = Literal["float32", "float16", "bfloat16"]
BITS: tuple[int, ...] = get_args(Bits)
SCALE_DTYPES: tuple[str, ...] = get_args(ScaleType)
#: Significant bits of a scale type, the leading one included.
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
#: Group size that stands for one scale per output row.
PER_CHANNEL = -1


@dataclass(frozen=True)
class Grid(Settings):
    """Grid of the codes.

    Parameters
    ----------
    bits : {2, 3, 4, 8}
        Bits of a code.
    group_size : int
        Input columns that share a scale; -1: one scale per output row. A last group that is shorter has a scale of its
        own, taken from its real columns.
    symmetric : bool
        Signed codes without a zero point; else unsigned codes, with a zero point for each group.
    scale_dtype : {"float32", "float16", "bfloat16"}
        Stored type of the scales, which are rounded to it before any code is computed.
    scale_bits : int, optional
        Significant bits that scales keep, the leading one included; all of the type when absent. With 5, the product
        of a symmetric INT4 code and its scale is exact in bfloat16 (docs/formats/scales.md).
    """

    bits: Bits = setting(4, common=True)
    group_size: int = setting(128, common=True)
    symmetric: bool = setting(True, off="asymmetric")
    scale_dtype: ScaleType = setting("float16")
    scale_bits: int | None = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise ConfigError(f"group_size must be -1 (per channel) or at least 1; got {self.group_size!r}")
        most = SIGNIFICANT_BITS[self.scale_dtype]
        if self.scale_bits is not None and not 1 <= self.scale_bits <= most:
            raise ConfigError(
                f"scale_bits must be between 1 and {most}, the significant bits of {self.scale_dtype}; "
                f"got {self.scale_bits!r}"
            )

    @property
    def core_group_size(self) -> int:
        """Group size as the core takes it: 0 is one scale per output row."""
        return 0 if self.group_size == PER_CHANNEL else self.group_size

    @property
    def core_scale_dtype(self) -> str:
        """Scale type as the core takes it: "bfloat16", or "bfloat16:5" where five significant bits are kept."""
        return self.scale_dtype if self.scale_bits is None else f"{self.scale_dtype}:{self.scale_bits}"

    def width(self, columns: int) -> int:
        """Columns of a group in a row of that many."""
        return columns if self.group_size == PER_CHANNEL else self.group_size

    def n_groups(self, columns: int) -> int:
        """Scales of a row of that many input columns."""
        return -(-columns // self.width(columns))
