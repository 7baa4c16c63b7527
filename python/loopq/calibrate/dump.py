"""The calibration dump on disk: written shard by shard, read without torch. Format: docs/formats/dump.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import loopq._native as native
from loopq.calibrate.sums_file import GradientSums, gradient_sums_from, read_accumulator
from loopq.errors import DumpError
from loopq.layers.shared import SharedParameter
from loopq.storage.files import (
    MAX_SIZE,
    RawTensor,
    Stored,
    inside,
    read_bytes,
    read_header,
    read_json,
    read_tensor,
    read_tensors,
    write_json,
)
from loopq.storage.folders import check_folder
from loopq.storage.model_files import TENSORS, FileEntry, check_files, raw
from loopq.storage.schema import (
    Allowed,
    Count,
    Depth,
    Name,
    Object,
    Positive,
    Seed,
    checked,
    sealed,
    shown,
    unsealed,
)
from loopq.storage.weights import ModelWeights, stored_shape

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "loopq-dump"
MANIFEST = "manifest.json"
Rows = dict[str, dict[int, Count]]
_NUMBERED = re.compile(r"(shards|hessians|metrics)/[0-9]{3,9}\.safetensors")
_Number = Annotated[
    str, Allowed("shards/, hessians/ or metrics/, a number, .safetensors", _NUMBERED.fullmatch)
]


def rows_to_raw(rows: Tensor, dtype: str) -> RawTensor:
    """Convert input rows to the bytes of a storage type ("F32", "F16" or "BF16")."""
    import torch  # lazy: loopq imports without torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return raw(rows.to(kinds[dtype]))


@dataclass(frozen=True)
class DumpFile(FileEntry):
    """A shard of rows, or an input group's Hessian, per step or as a sum."""

    file: _Number
    input_group: str = ""
    per_step: bool = False


@dataclass(frozen=True)
class MetricFile(FileEntry):
    """The loop metric of a parameter over some steps, from some label draws for each of the first prompts."""

    file: _Number
    parameter: str
    steps: tuple[int, ...]
    n_prompts: Positive
    n_draws: Positive


@dataclass(frozen=True)
class _Part:
    seed: Seed
    sha256: str | None = None


@dataclass(frozen=True)
class _Calibration:
    """The part of a calibration set's description that readers need."""

    source: str
    n_prompts: Count
    n_tokens: Count
    parts: tuple[_Part, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Contents of a dump's `manifest.json`. The format is specified in docs/formats/dump.md."""

    kind: Literal["rows", "hessian"]
    system: str
    n_steps: Depth
    seed: Seed
    calibration: Object
    rows_dtype: Literal["F32", "F16", "BF16", ""]
    parameters: tuple[SharedParameter, ...]
    input_groups: dict[str, str]
    rows: Rows
    files: tuple[DumpFile, ...]
    model: tuple[FileEntry, ...]
    ties: dict[Name, Name]
    loopq_version: str
    metrics: tuple[MetricFile, ...] = ()
    depths: tuple[Depth, ...] = ()

    def __post_init__(self) -> None:
        """Refuse inconsistent parts, also before they are written."""
        checked(_Calibration, self.calibration, "calibration", DumpError, others=True)
        names = {p.name: p for p in self.parameters}
        if len(names) != len(self.parameters):
            raise DumpError("parameters: a name stands twice")
        for p in self.parameters:
            checked(
                tuple[Positive, Positive], [p.in_features, p.out_features], f"{p.name}: features", DumpError
            )
            checked(Depth, p.invocations, f"{p.name}: invocations", DumpError)
        if not set(self.input_groups) | set(self.input_groups.values()) <= set(names):
            raise DumpError("input_groups: a name that is not among the parameters")
        if not set(self.rows) <= set(self.input_groups.values()):
            raise DumpError("rows: a name that is not among the input groups")
        if any(
            step >= names[input_group].invocations
            for input_group, steps in self.rows.items()
            for step in steps
        ):
            raise DumpError("rows: a step that the parameter does not have")
        folder, input_groups = ("shards/", []) if self.kind == "rows" else ("hessians/", sorted(self.rows))
        listed = sorted(f.input_group for f in self.files if f.input_group)
        if listed != input_groups or not all(f.file.startswith(folder) for f in self.files):
            raise DumpError(f"files: not those of a dump of kind {self.kind!r} with these rows")
        measured = [m.parameter for m in self.metrics]
        if not set(measured) <= set(self.input_groups) or len(set(measured)) != len(measured):
            raise DumpError("metrics: a name that is not among the input groups, or stands twice")
        if len({(m.n_prompts, m.n_draws) for m in self.metrics}) > 1 or not all(
            m.file.startswith("metrics/") for m in self.metrics
        ):
            raise DumpError("metrics: of unlike prompts and draws, or a file of another kind")
        if self.metrics and self.kind != "hessian":
            raise DumpError("metrics: they go with a dump of kind 'hessian'")
        stored = [f.file for f in (*self.files, *self.metrics, *self.model)]
        if not self.files or TENSORS not in stored or len(set(stored)) != len(stored):
            raise DumpError(f"files, model: none, without {TENSORS}, or a name that stands twice")

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, which completes the dump."""
        said = {name: value for name, value in vars(self).items() if name != "depths" or value}
        write_json(folder / MANIFEST, sealed(FORMAT, said))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check `manifest.json`."""
        path = folder / MANIFEST
        if not path.exists():
            check_folder(folder, DumpError)
            raise DumpError(f"{folder}: not a dump: no {MANIFEST}; give an interrupted `loopq collect` again")
        data = unsealed(read_json(inside(folder, MANIFEST, DumpError), DumpError), FORMAT, path, DumpError)
        return checked(cls, data, path, DumpError)


@dataclass(frozen=True)
class StoredSums:
    """Hessians and loop metrics in files. Each is read on access.

    Parameters
    ----------
    folder : Path
        Folder of the files.
    parameters : sequence of SharedParameter
        The layers. Others may be among them.
    files : sequence of DumpFile
        The Hessian of each input group.
    metrics : sequence of MetricFile
        The loop metrics.
    rows : dict
        Rows of each Hessian by input group and step.
    threads : int
        Threads of the core; 0 takes all cores.
    """

    folder: Path
    parameters: Sequence[SharedParameter]
    files: Sequence[DumpFile]
    metrics: Sequence[MetricFile]
    rows: Rows
    threads: int = 0

    def accumulator(
        self, input_group: str, steps: Sequence[int], *, per_step: bool = False
    ) -> native.HessianAccumulator:
        """Read the Hessian of one input group. It must hold exactly these steps, or each step separately.

        `per_step` is for sources that sum on demand. It has no effect here.

        Raises
        ------
        DumpError
            There is none, it holds other steps, or the file is damaged.
        """
        entry = next((e for e in self.files if e.input_group == input_group), None)
        if entry is None:
            raise DumpError(f"{self.folder}: no Hessian for layer {input_group}")
        acc = read_accumulator(self.folder / entry.file, threads=self.threads)
        rows, have = self.rows[input_group], sorted(self.rows[input_group])
        dim = self._parameter(input_group).in_features
        expected = (dim, have, entry.per_step, [rows[t] for t in have])
        if (acc.dim, acc.steps, acc.per_step, [acc.n_rows(t) for t in acc.steps]) != expected:
            raise DumpError(f"{self.folder / entry.file}: not the Hessian that the manifest describes")
        if not set(steps) <= set(have) or (not entry.per_step and list(steps) != have):
            raise DumpError(
                f"{self.folder}: layer {input_group}: steps {shown(list(steps))} asked for; this file holds "
                f"{'each of' if entry.per_step else 'only the sum over'} steps {shown(have)}. Collect again with "
                "those steps, or with --per-step"
            )
        return acc

    def metric_file(self, name: str, steps: Sequence[int]) -> MetricFile:
        """Find the loop metric of a parameter.

        Raises
        ------
        DumpError
            There is none over these steps.
        """
        entry = next((m for m in self.metrics if m.parameter == name), None)
        if entry is None:
            raise DumpError(
                f"{self.folder}: no loop metric of layer {name}: collect again with --metric loop, or take metric "
                "'inputs' here"
            )
        if tuple(steps) != entry.steps:
            raise DumpError(
                f"{self.folder}: layer {name}: its loop metric is over steps {shown(list(entry.steps))}; "
                f"{shown(list(steps))} asked for: collect again with those"
            )
        return entry

    def gradient_sums(self, entry: MetricFile) -> GradientSums:
        """Read the sums of a loop metric.

        Raises
        ------
        DumpError
            The file does not fit the parameter.
        """
        path = self.folder / entry.file
        return gradient_sums_from(read_tensors(path, DumpError), self._parameter(entry.parameter), str(path))

    def remove(self) -> None:
        """Remove the files."""
        for entry in (*self.files, *self.metrics):
            (self.folder / entry.file).unlink()

    def _parameter(self, name: str) -> SharedParameter:
        return next(p for p in self.parameters if p.name == name)


class Dump:
    """A dump opened for reading. Every file is checked against its SHA-256.

    Parameters
    ----------
    folder : Path
        The dump.
    threads : int
        Threads that sum rows; 0 takes all cores.

    Raises
    ------
    DumpError
        A file is missing, truncated or altered, or the row counts do not match.
    """

    def __init__(self, folder: Path, *, threads: int = 0) -> None:
        self.folder = folder
        self._threads = threads
        self.manifest = Manifest.read(folder)
        check_files(folder, self.manifest.files, DumpError)
        check_files(folder, self.manifest.metrics, DumpError)
        check_files(folder, self.manifest.model, DumpError, within="model")
        self.sums = StoredSums(
            folder,
            self.manifest.parameters,
            self.manifest.files,
            self.manifest.metrics,
            self.manifest.rows,
            threads,
        )
        self._dims = {p.name: p.in_features for p in self.manifest.parameters}
        self._headers: dict[str, dict[str, Stored]] = {}
        if self.manifest.kind == "rows":
            self._check_rows()

    def _check_rows(self) -> None:
        rows: Rows = {
            k: {step: 0 for step, n in steps.items() if not n} for k, steps in self.manifest.rows.items()
        }
        for entry in self.manifest.files:
            path = self.folder / entry.file
            header, _ = read_header(path, DumpError)
            self._headers[entry.file] = header
            for name, stored in header.items():
                input_group, _, step = name.rpartition("/")
                if input_group not in rows or not re.fullmatch("[0-9]{1,9}", step):
                    raise DumpError(f"{path}: tensor {shown(name)} is not in the manifest")
                dim = self._dims[input_group]
                if stored.dtype != self.manifest.rows_dtype or stored.shape[1:] != (dim,):
                    raise DumpError(
                        f"{path}: tensor {name!r} is {stored.dtype} {list(stored.shape)}; the manifest says "
                        f"{self.manifest.rows_dtype} [rows, {dim}]"
                    )
                steps = rows[input_group]
                steps[int(step)] = steps.get(int(step), 0) + stored.shape[0]
        if rows != self.manifest.rows:
            raise DumpError(f"{self.folder}: the rows of its shards do not add up to those of the manifest")

    def accumulator(
        self, input_group: str, steps: Sequence[int], *, per_step: bool = False
    ) -> native.HessianAccumulator:
        """Sum the Hessian of one input group over the chosen steps, streaming from the files.

        Returns
        -------
        HessianAccumulator
            The finished accumulator.
        """
        if self.manifest.kind == "hessian":
            return self.sums.accumulator(input_group, steps)
        dim = self._dims[input_group]
        acc = native.HessianAccumulator(dim, list(steps), per_step=per_step, threads=self._threads)
        for step in steps:
            for file, header in self._headers.items():
                if f"{input_group}/{step}" in header:
                    acc.update_file(step, self.folder / file, f"{input_group}/{step}")
        acc.finish()
        return acc

    def weights(self) -> ModelWeights:
        """Return the stored weights of the model. Each tensor is read on access.

        Raises
        ------
        DumpError
            A weight is missing or differs in shape from the manifest.
        """
        path = self.folder / "model" / TENSORS
        tensors = _FileTensors(path)
        for p in self.manifest.parameters:
            name = self.manifest.ties.get(p.name, p.name)
            stored, shape = tensors.header.get(name), (p.out_features, p.in_features)
            if stored is None or stored.shape != stored_shape(shape, p.orientation):
                what = "no tensor" if stored is None else f"shape {list(stored.shape)} of tensor"
                raise DumpError(f"{path}: {what} {name!r}; the manifest says {list(shape)}, {p.orientation}")
        return ModelWeights(tensors, dict(self.manifest.ties))

    def side_files(self) -> dict[str, bytes]:
        """Read config and tokenizer files."""
        names = [e.file for e in self.manifest.model if e.file != TENSORS]
        return {name: read_bytes(self.folder / "model" / name, MAX_SIZE, DumpError) for name in names}


class _FileTensors(Mapping[str, RawTensor]):
    """The tensors of a safetensors file. Each tensor is read on access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.header, _ = read_header(path, DumpError)

    def __getitem__(self, name: str) -> RawTensor:
        if name not in self.header:
            raise DumpError(f"{self._path}: no tensor {name!r}")
        return read_tensor(self._path, self.header[name], DumpError)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)

    def __len__(self) -> int:
        return len(self.header)
