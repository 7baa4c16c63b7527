"""Importance for llama.cpp's quantizer, read by `llama-quantize --imatrix`. Spec: docs/formats/gguf.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loopq.errors import require
from loopq.formats import FORMATS
from loopq.formats.base import Check, Format, FormatOptions, Option, WrittenFile
from loopq.formats.gguf.file import contents, holds_gguf, open_gguf, told
from loopq.formats.gguf.shape import Shape
from loopq.storage.folders import check_new, output_file
from loopq.terminal.table import size


class Entry(NamedTuple):
    """Importance of one layer: sum over rows by input column, row count, and whether the loop metric made it."""

    name: str
    sums: NDArray[np.float64]
    n_rows: int
    by_metric: bool


class Observed(Protocol):
    """Observations of a model. `loopq.run.imatrix` makes them from a calibration dump."""

    @property
    def side_files(self) -> Mapping[str, bytes]:
        """Config files of the model."""

    @property
    def calibration(self) -> Mapping[str, Any]:
        """Origin of the prompts ("source"), "n_prompts" and "n_tokens"."""

    def entries(self, steps: str) -> Iterator[Entry]:
        """Return the importance of every layer over some steps of the loop."""


@dataclass(frozen=True)
class ImportanceOptions(FormatOptions):
    """`steps` selects those that count, as in `loopq.settings.steps.parse_steps`."""

    steps: str = "all"


_DEFAULTS = ImportanceOptions()


class IMatrix(Format):
    """One file of llama.cpp with a weight for every input column of every layer."""

    name: ClassVar[str] = "imatrix"
    takes: ClassVar[Literal["checkpoint", "model", "dump"]] = "dump"
    one_file: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    options: ClassVar[tuple[Option, ...]] = (
        Option("steps", "the steps of the loop that count (default all)", metavar="STEPS"),
    )

    values: ClassVar[type[FormatOptions]] = ImportanceOptions

    def holds(self, path: Path) -> bool:
        """Whether it is a GGUF file with importance."""
        return holds_gguf(path, importance=True)

    def write(
        self,
        out: Path,
        source: Observed,
        options: ImportanceOptions = _DEFAULTS,
        *,
        also: Check | None = None,
    ) -> WrittenFile:
        """Write the file."""
        gguf = require("gguf")
        check_new(out)
        shape = Shape.read(source.side_files)
        text = source.calibration
        n_layers = n_by_metric = 0
        with output_file(out, 0) as temporary, told(out):
            writer = gguf.GGUFWriter(temporary, shape.name)
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", [str(text["source"])])
            writer.add_uint32("imatrix.chunk_count", text["n_prompts"])
            writer.add_uint32("imatrix.chunk_size", text["n_tokens"] // text["n_prompts"])
            for entry in source.entries(options.steps):
                n_layers += 1
                n_by_metric += entry.by_metric
                for name in shape.tensors(entry.name):
                    writer.add_tensor(f"{name}.in_sum2", entry.sums[None].astype(np.float32))
                    writer.add_tensor(f"{name}.counts", np.array([[entry.n_rows]], np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        by = f"; {n_by_metric} by the loop metric" if n_by_metric else ""
        said = f"{out}: importance of {n_layers} layers, steps {options.steps}{by}"
        return WrittenFile(out, self.name, (said,))

    def facts(self, path: Path) -> dict[str, Any]:
        """Describe the file: its layers and the text of the observations."""
        reader = open_gguf(path)
        with told(path):
            rows = {t.name: float(t.data.ravel()[0]) for t in reader.tensors if t.name.endswith(".counts")}
            columns = {
                t.name.removesuffix(".in_sum2"): int(t.n_elements)
                for t in reader.tensors
                if t.name.endswith(".in_sum2")
            }
        return {
            "format": self.name,
            "architecture": contents(path, reader, "general.architecture"),
            "datasets": contents(path, reader, "imatrix.datasets"),
            "chunk_count": contents(path, reader, "imatrix.chunk_count"),
            "chunk_size": contents(path, reader, "imatrix.chunk_size"),
            "n_bytes": path.stat().st_size,
            "layers": [
                {"name": name, "n_columns": n, "n_rows": rows.get(f"{name}.counts")}
                for name, n in columns.items()
            ],
        }

    def describe(self, facts: Mapping[str, Any]) -> list[str]:
        """Number of layers and the text."""
        return [
            f"format {self.name}, architecture {facts['architecture']}: importance of {len(facts['layers'])} layers; "
            f"{facts['chunk_count']} chunks of {facts['chunk_size']} tokens of {facts['datasets']}; "
            f"{size(facts['n_bytes'])} on disk"
        ]


FORMATS.register(IMatrix.name)(IMatrix())
