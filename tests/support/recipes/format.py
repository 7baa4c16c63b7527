"""The recipe of CONTRIBUTING for a format: one file for `loopq/formats`. Nothing here imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.base import Check, Format, FormatOptions, Option, Planned, WrittenFile
from loopq.formats.checkpoint import Checkpoint
from loopq.layers.grid import Grid
from loopq.storage.files import replacing


@dataclass(frozen=True)
class MadeUpOptions(FormatOptions):
    """`repeats`: how often each name is written."""

    repeats: str = "1"


_DEFAULTS = MadeUpOptions()


class MadeUpFormat(Format):
    """Names of the layers, louder."""

    name: ClassVar[str] = "madeup"
    one_file: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    options: ClassVar[tuple[Option, ...]] = (Option("repeats", "how often each name is written"),)
    values: ClassVar[type[FormatOptions]] = MadeUpOptions

    def holds(self, path: Path) -> bool:
        """Whether the file's name ends like the format's."""
        return path.suffix == ".madeup"

    def can_hold(self, grid: Grid) -> bool:
        """Any grid."""
        return True

    def refuse(self, planned: Planned, options: MadeUpOptions = _DEFAULTS) -> None:
        """Reject codes of 8 bits."""
        super().refuse(planned)
        for layer in planned.layers:
            if layer.grid.bits == 8:
                raise CheckpointError(f"layer {layer.name}: madeup cannot hold {layer.grid.label}")

    def write(
        self, out: Path, source: Checkpoint, options: MadeUpOptions = _DEFAULTS, *, also: Check | None = None
    ) -> WrittenFile:
        """Write names and labels."""
        lines = [f"{name} {layer.grid.label}" for name, layer in source.layers.items()]
        with replacing(out) as temporary:
            temporary.write_text("\n".join(lines * int(options.repeats)))
        return WrittenFile(out, self.name, ("written",))

    def facts(self, path: Path) -> dict[str, Any]:
        """Describe the file."""
        return {"format": self.name, "names": path.read_text().splitlines()}

    def describe(self, facts: Mapping[str, Any]) -> list[str]:
        """The names."""
        return list(facts["names"])


FORMATS.register(MadeUpFormat.name)(MadeUpFormat())
