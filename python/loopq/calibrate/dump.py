"""The calibration dump on disk: written shard by shard, read without torch. Format: docs/formats/dump.md."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import ConfigError, DumpError, LoopqError
from loopq.layers.reader import TensorReader
from loopq.layers.shared import SharedParameter
from loopq.storage.files import (
    MAX_SIZE,
    RawTensor,
    Stored,
    check_folder,
    inside,
    new_folder,
    read_bytes,
    read_header,
    read_json,
    read_tensor,
    read_tensors,
    sha256,
    write_json,
    write_tensors,
)
from loopq.storage.lock import new_or_same
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
    parse_json,
    sealed,
    shown,
    unsealed,
)
from loopq.storage.weights import ModelWeights, stored_shape
from loopq.terminal.progress import Progress

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
class GradientSums:
    """The arrays of a loop metric (`loopq.quantizers.loop_metric.LoopMetric`).

    Parameters
    ----------
    left : tuple of ndarray, float64
        Blocks of A. Each has consecutive outputs and shape (b, b).
    right : ndarray, float64, shape (in_features, in_features)
        The gradient part of S.
    """

    left: tuple[NDArray[np.float64], ...]
    right: NDArray[np.float64]


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
        self._headers: dict[str, dict[str, Stored]] = {}
        if self.manifest.kind == "rows":
            self._check_rows()

    def _check_rows(self) -> None:
        dims = {p.name: p.in_features for p in self.manifest.parameters}
        found: Rows = {
            k: {step: 0 for step, n in steps.items() if not n} for k, steps in self.manifest.rows.items()
        }
        for entry in self.manifest.files:
            path = self.folder / entry.file
            header, _ = read_header(path, DumpError)
            self._headers[entry.file] = header
            for name, stored in header.items():
                input_group, _, step = name.rpartition("/")
                if input_group not in found or not re.fullmatch("[0-9]{1,9}", step):
                    raise DumpError(f"{path}: tensor {shown(name)} is not in the manifest")
                if stored.dtype != self.manifest.rows_dtype or stored.shape[1:] != (dims[input_group],):
                    raise DumpError(
                        f"{path}: tensor {name!r} is {stored.dtype} {list(stored.shape)}; the manifest says "
                        f"{self.manifest.rows_dtype} [rows, {dims[input_group]}]"
                    )
                steps = found[input_group]
                steps[int(step)] = steps.get(int(step), 0) + stored.shape[0]
        if found != self.manifest.rows:
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
            return self._stored(input_group, steps)
        dim = next(p.in_features for p in self.manifest.parameters if p.name == input_group)
        acc = native.HessianAccumulator(dim, list(steps), per_step=per_step, threads=self._threads)
        for step in steps:
            for file, header in self._headers.items():
                if f"{input_group}/{step}" in header:
                    acc.update_file(step, self.folder / file, f"{input_group}/{step}")
        acc.finish()
        return acc

    def _stored(self, input_group: str, steps: Sequence[int]) -> native.HessianAccumulator:
        entry = next((e for e in self.manifest.files if e.input_group == input_group), None)
        if entry is None:
            raise DumpError(f"{self.folder}: no Hessian for layer {input_group}")
        acc = read_accumulator(self.folder / entry.file)
        rows, dims = (
            self.manifest.rows[input_group],
            {p.name: p.in_features for p in self.manifest.parameters},
        )
        have = sorted(rows)
        told = (dims[input_group], have, entry.per_step, [rows[t] for t in have])
        if (acc.dim, acc.steps, acc.per_step, [acc.n_rows(t) for t in acc.steps]) != told:
            raise DumpError(f"{self.folder / entry.file}: not the Hessian that the manifest describes")
        if not set(steps) <= set(have) or (not entry.per_step and list(steps) != have):
            raise DumpError(
                f"{self.folder}: layer {input_group}: steps {shown(list(steps))} asked for; this file holds "
                f"{'each of' if entry.per_step else 'only the sum over'} steps {shown(have)}. Collect again with "
                "those steps, or with --per-step"
            )
        return acc

    def gradient_sums(self, name: str, steps: Sequence[int]) -> GradientSums:
        """Read the sums of a parameter's loop metric.

        Raises
        ------
        DumpError
            The dump has no sums over these steps, or the file does not fit the parameter.
        """
        entry = next((m for m in self.manifest.metrics if m.parameter == name), None)
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
        parameter = next(p for p in self.manifest.parameters if p.name == name)
        path = self.folder / entry.file
        return gradient_sums_from(read_tensors(path, DumpError), parameter, str(path))

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
                found = "no tensor" if stored is None else f"shape {list(stored.shape)} of tensor"
                raise DumpError(f"{path}: {found} {name!r}; the manifest says {list(shape)}, {p.orientation}")
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


@dataclass(frozen=True)
class _State:
    """Metadata of a Hessian file: the state of docs/formats/hessian.md without its arrays."""

    spec_version: Literal[1]
    dim: Positive
    steps: tuple[Count, ...]
    per_step: bool
    n_rows: tuple[Count, ...]


def accumulator_parts(acc: native.HessianAccumulator) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Return the exact state of a finished accumulator as arrays and plain data.

    Tensors `hi.<i>` and `lo.<i>`, int64, hold the packed upper triangles (docs/formats/hessian.md). Each separate step
    has its own pair.
    """
    state: dict[str, Any] = dict(acc.state())
    arrays = {
        f"{limb}.{i:03d}": RawTensor.of(values)
        for limb in ("hi", "lo")
        for i, values in enumerate(state.pop(limb))
    }
    return arrays, state


def accumulator_from(arrays: Mapping[str, RawTensor], state: Any, where: str) -> native.HessianAccumulator:
    """Rebuild an accumulator from `accumulator_parts`.

    Raises
    ------
    DumpError
        The state is invalid.
    """
    found = checked(_State, state, f"{where}: Hessian state", DumpError)
    reader = TensorReader(where, arrays)
    entries = found.dim * (found.dim + 1) // 2
    names = [f"{i:03d}" for i in range(min(len(found.steps), len(arrays)) if found.per_step else 1)]
    whole: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(found).items()}
    try:
        for limb in ("hi", "lo"):
            whole[limb] = [reader.get(f"{limb}.{n}", ["I64"], (entries,)).array() for n in names]
        if reader.used != set(arrays):
            raise DumpError("tensors that are no part of it")
        return native.HessianAccumulator.from_state(cast(Any, whole))
    except (LoopqError, TypeError, ValueError, OverflowError) as cause:
        raise DumpError(f"{where}: damaged Hessian state: {cause}") from cause


def write_accumulator(path: Path, acc: native.HessianAccumulator) -> str:
    """Write the exact state of a finished accumulator and return the SHA-256 of the file.

    Everything except the arrays is JSON under the metadata key "loopq_hessian".
    """
    arrays, state = accumulator_parts(acc)
    return write_tensors(path, arrays, {"loopq_hessian": json.dumps(state, sort_keys=True)})


def read_accumulator(path: Path) -> native.HessianAccumulator:
    """Read the exact state of an accumulator.

    Raises
    ------
    DumpError
        The file is of another kind, truncated, or has an invalid state.
    """
    _, metadata = read_header(path, DumpError)
    state = parse_json(metadata.get("loopq_hessian", "null"), path, DumpError)
    return accumulator_from(read_tensors(path, DumpError), state, str(path))


def write_gradient_sums(path: Path, sums: GradientSums) -> str:
    """Write the sums of a loop metric, tensors `left.<i>` and `right`. Return the SHA-256 of the file."""
    arrays = {f"left.{i:05d}": a for i, a in enumerate(sums.left)} | {"right": sums.right}
    return write_tensors(path, {name: RawTensor.of(a) for name, a in arrays.items()})


def gradient_sums_from(
    arrays: Mapping[str, RawTensor], parameter: SharedParameter, where: str
) -> GradientSums:
    """Read the result of `write_gradient_sums`.

    Raises
    ------
    DumpError
        A tensor has another type or shape, or an entry that is impossible for a sum of squares.
    """
    reader = TensorReader(where, arrays)
    width = parameter.in_features
    try:
        left = []
        for i in range(len(arrays) - 1):
            side = (arrays.get(f"left.{i:05d}", RawTensor("F64", (), np.zeros(0, np.uint8))).shape or (0,))[0]
            left.append(reader.get(f"left.{i:05d}", ["F64"], (side, side)).array())
        right = reader.get("right", ["F64"], (width, width)).array()
    except LoopqError as cause:
        raise DumpError(str(cause)) from cause
    if sum(len(a) for a in left) != parameter.out_features:
        raise DumpError(
            f"{where}: blocks of {shown([len(a) for a in left])} outputs; the layer has "
            f"{parameter.out_features}"
        )
    for a in (*left, right):
        if not np.isfinite(a).all() or (np.diag(a) < 0).any():
            raise DumpError(f"{where}: damaged loop metric: an entry that no sum of squares can have")
    return GradientSums(tuple(left), right)


def merge(parts: Sequence[Path], out: Path, progress: Progress | None = None) -> Manifest:
    """Add Hessian dumps that were collected separately.

    Parameters
    ----------
    parts : sequence of Path
        Hessian dumps of the same model, system, depth and steps.
    out : Path
        New dump. The sum is over integers, so the order of the parts changes no bit.
    progress : Progress, optional
        Receives a note if a killed run had already written this dump.

    Raises
    ------
    DumpError
        The parts do not match, or two have the same calibration tokens and seed.
    """
    if len(parts) < 2:
        raise ConfigError("merge needs at least two parts; name another dump")
    with new_or_same(out, DumpError) as place:
        merged = _merged(parts, place)
    if place != out and progress is not None:
        progress.note(f"{out} was written before the interruption; compared, byte for byte")
    return merged


def _merged(parts: Sequence[Path], out: Path) -> Manifest:
    """Write the sum of dumps to a new folder."""
    ordered = sorted((Dump(p) for p in parts), key=lambda d: sha256(d.folder / MANIFEST))
    _check_parts(ordered)
    first = ordered[0].manifest
    rows: Rows = {
        k: {t: sum(d.manifest.rows[k][t] for d in ordered) for t in v} for k, v in first.rows.items()
    }
    calibration = {
        "source": "merged",
        "parts": [part for d in ordered for part in _parts_of(d.manifest)],
        "n_prompts": sum(d.manifest.calibration["n_prompts"] for d in ordered),
        "n_tokens": sum(d.manifest.calibration["n_tokens"] for d in ordered),
    }
    model = ordered[0].folder / "model"
    n_bytes = sum(e.n_bytes for e in (*first.files, *first.model))
    with new_folder(out, n_bytes, DumpError) as folder:
        files = [_sum_of(entry, ordered, folder) for entry in first.files]
        (folder / "model").mkdir()
        for entry in first.model:
            shutil.copyfile(model / entry.file, folder / "model" / entry.file)
        merged = dataclasses.replace(first, rows=rows, files=tuple(files), calibration=calibration)
        merged.write(folder)
    return merged


def _sum_of(entry: DumpFile, parts: Sequence[Dump], out: Path) -> DumpFile:
    """Write the sum of one input group's Hessians and return its manifest entry."""
    steps = sorted(parts[0].manifest.rows[entry.input_group])
    total, *others = (part.accumulator(entry.input_group, steps) for part in parts)
    for other in others:
        total.merge(other)
    path = out / entry.file
    digest = write_accumulator(path, total)
    return dataclasses.replace(entry, sha256=digest, n_bytes=path.stat().st_size)


def _parts_of(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the descriptions and seeds of the calibration sets in a dump."""
    own = [manifest.calibration | {"seed": manifest.seed}]
    return list(manifest.calibration.get("parts", own))


def _check_parts(dumps: Sequence[Dump]) -> None:
    first = dumps[0].manifest
    seen: dict[tuple[str, int], Path] = {}
    for dump in dumps:
        m = dump.manifest
        if m.kind != "hessian":
            raise DumpError(f"{dump.folder}: a dump of rows; only Hessian dumps are merged")
        if m.metrics:
            raise DumpError(
                f"{dump.folder}: holds a loop metric, which cannot be added to another: its gradients are weighed by "
                "the Hessian of all prompts. Collect on all prompts at once, or the parts without --metric"
            )
        for what in ("system", "n_steps", "depths", "parameters", "input_groups", "model", "ties"):
            if getattr(m, what) != getattr(first, what):
                raise DumpError(f"{dump.folder}: its {what} differ from those of {dumps[0].folder}")
        if {k: sorted(v) for k, v in m.rows.items()} != {k: sorted(v) for k, v in first.rows.items()}:
            raise DumpError(f"{dump.folder}: its steps differ from those of {dumps[0].folder}")
        for part in _parts_of(m):
            key = (str(part.get("sha256")), part["seed"])
            if key in seen:
                raise DumpError(
                    f"{dump.folder}: the same tokens and seed as {seen[key]}: they would count "
                    "twice; leave one of the two out"
                )
            seen[key] = dump.folder
