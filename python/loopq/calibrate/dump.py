"""The calibration dump on disk: written shard by shard, read without torch. Format: docs/formats/dump.md."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import loopq._native as native
from loopq.checkpoint.files import (
    RawTensor,
    Stored,
    check_folder,
    check_new,
    new_folder,
    read_header,
    read_json,
    read_tensor,
    read_tensors,
    sha256,
    write_json,
    write_tensors,
)
from loopq.checkpoint.model_files import TENSORS, check_files
from loopq.checkpoint.weights import ModelWeights
from loopq.errors import DumpError, LoopqError, NonFiniteError
from loopq.systems.base import SharedParameter

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "loopq-dump"
VERSION = 1
Rows = dict[str, dict[int, int]]


def rows_to_raw(rows: Tensor, dtype: str) -> RawTensor:
    """Copy input rows to bytes of a storage type ("F32", "F16" or "BF16")."""
    import torch

    from loopq.checkpoint.model_files import raw

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return raw(rows.to(kinds[dtype]))


@dataclass(frozen=True)
class Manifest:
    """What a dump's `manifest.json` says; the format is specified in docs/formats/dump.md."""

    kind: str
    system: str
    n_steps: int
    seed: int
    calibration: dict[str, Any]
    rows_dtype: str
    parameters: tuple[SharedParameter, ...]
    leaders: dict[str, str]
    rows: Rows
    files: tuple[dict[str, Any], ...]
    model: tuple[dict[str, Any], ...]
    ties: dict[str, str]
    loopq_version: str

    def write(self, folder: Path) -> None:
        """Write `manifest.json`; the folder is a dump from then on."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
        }
        data["parameters"] = [dataclasses.asdict(p) for p in self.parameters]
        write_json(folder / "manifest.json", data)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check `manifest.json`."""
        path = folder / "manifest.json"
        if not path.is_file():
            check_folder(folder, DumpError)
            raise DumpError(
                f"{folder}: not a dump: it has no manifest.json (was its collection interrupted?)"
            )
        data = read_json(path, DumpError)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise DumpError(f"{path}: not the manifest of a loopq dump")
        version = data.pop("version", None)
        if version != VERSION:
            raise DumpError(f"{path}: version {version}; this loopq reads version {VERSION}")
        try:
            data["parameters"] = tuple(
                SharedParameter(**{**p, "owners": tuple(p["owners"])}) for p in data["parameters"]
            )
            data["rows"] = {k: {int(t): int(n) for t, n in v.items()} for k, v in data["rows"].items()}
            data["files"], data["model"] = tuple(data["files"]), tuple(data["model"])
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise DumpError(f"{path}: damaged: {cause}") from cause


class Dump:
    """A dump opened for reading.

    Parameters
    ----------
    folder : Path
        The dump.
    deep : bool
        Compare SHA-256 sums, not only sizes; reads every byte once.
    threads : int
        Threads that sum rows; 0 takes all cores.

    Raises
    ------
    DumpError
        A file is missing, truncated or altered, or things do not add up.
    """

    def __init__(self, folder: Path, *, deep: bool = True, threads: int = 0) -> None:
        self.folder = folder
        self._threads = threads
        self.manifest = Manifest.read(folder)
        check_files(folder, list(self.manifest.files), DumpError, deep=deep)
        check_files(folder / "model", list(self.manifest.model), DumpError, deep=deep)
        self._headers: dict[str, dict[str, Stored]] = {}
        if self.manifest.kind == "rows":
            self._check_rows()
        elif self.manifest.kind != "hessian":
            raise DumpError(f"{folder}: kind {self.manifest.kind!r}; known kinds: rows, hessian")

    def _check_rows(self) -> None:
        dims = {p.name: p.in_features for p in self.manifest.parameters}
        found: Rows = {leader: {} for leader in self.manifest.rows}
        for entry in self.manifest.files:
            path = self.folder / entry["file"]
            header, _ = read_header(path, DumpError)
            self._headers[entry["file"]] = header
            for name, stored in header.items():
                leader, _, step = name.rpartition("/")
                if leader not in found or not step.isdigit():
                    raise DumpError(f"{path}: tensor {name!r} is not in the manifest")
                if stored.dtype != self.manifest.rows_dtype or stored.shape[1:] != (dims[leader],):
                    raise DumpError(
                        f"{path}: tensor {name!r} is {stored.dtype} {list(stored.shape)}; the manifest says "
                        f"{self.manifest.rows_dtype} [rows, {dims[leader]}]"
                    )
                steps = found[leader]
                steps[int(step)] = steps.get(int(step), 0) + stored.shape[0]
        if found != self.manifest.rows:
            raise DumpError(f"{self.folder}: the rows of its shards do not add up to those of the manifest")

    def accumulator(
        self, leader: str, steps: Sequence[int], *, per_step: bool = False
    ) -> native.HessianAccumulator:
        """Sum the Hessian of one input group over the steps chosen, streaming from the files.

        Returns
        -------
        HessianAccumulator
            Finished.
        """
        if self.manifest.kind == "hessian":
            return self._stored(leader, steps)
        dim = next(p.in_features for p in self.manifest.parameters if p.name == leader)
        acc = native.HessianAccumulator(dim, list(steps), per_step=per_step, threads=self._threads)
        for step in steps:
            for entry in self.manifest.files:
                stored = self._headers[entry["file"]].get(f"{leader}/{step}")
                if stored is None:
                    continue
                path = self.folder / entry["file"]
                try:
                    acc.update_file(step, str(path), stored.offset, stored.shape[0], cast(Any, stored.dtype))
                except NonFiniteError as cause:
                    raise NonFiniteError(f"layer {leader}, {path}: {cause}") from cause
        acc.finish()
        return acc

    def _stored(self, leader: str, steps: Sequence[int]) -> native.HessianAccumulator:
        entry = next((e for e in self.manifest.files if e["leader"] == leader), None)
        if entry is None:
            raise DumpError(f"{self.folder}: no Hessian for layer {leader}")
        acc = read_accumulator(self.folder / entry["file"])
        have = sorted(self.manifest.rows[leader])
        if not set(steps) <= set(have) or (not entry["per_step"] and list(steps) != have):
            raise DumpError(
                f"{self.folder}: layer {leader}: steps {list(steps)} asked for; this file holds "
                f"{'each of' if entry['per_step'] else 'only the sum over'} steps {have}. Collect again with "
                "those steps, or with --per-step"
            )
        return acc

    def weights(self) -> ModelWeights:
        """The stored weights of the model; each is read when it is asked for."""
        return ModelWeights(_FileTensors(self.folder / "model" / TENSORS), dict(self.manifest.ties))

    def side_files(self) -> dict[str, bytes]:
        """Read config and tokenizer files."""
        model = self.folder / "model"
        return {
            e["file"]: (model / e["file"]).read_bytes() for e in self.manifest.model if e["file"] != TENSORS
        }


class _FileTensors(Mapping[str, RawTensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header, _ = read_header(path, DumpError)

    def __getitem__(self, name: str) -> RawTensor:
        if name not in self._header:
            raise DumpError(f"{self._path}: no tensor {name!r}")
        return read_tensor(self._path, self._header[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)


def accumulator_parts(acc: native.HessianAccumulator) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Return the exact state of a finished accumulator as arrays and plain data.

    Tensors `hi.<i>` and `lo.<i>`, int64, hold the packed upper triangles (docs/formats/hessian.md), one pair for each
    step that is kept apart.
    """
    state: dict[str, Any] = dict(acc.state())
    arrays = {
        f"{limb}.{i:03d}": RawTensor.of(values)
        for limb in ("hi", "lo")
        for i, values in enumerate(state.pop(limb))
    }
    return arrays, state


def accumulator_from(
    arrays: Mapping[str, RawTensor], state: Mapping[str, Any], where: str
) -> native.HessianAccumulator:
    """Rebuild an accumulator from `accumulator_parts`.

    Raises
    ------
    DumpError
        A state that cannot be.
    """
    limbs = {
        limb: [t.array() for name, t in sorted(arrays.items()) if name.startswith(limb)]
        for limb in ("hi", "lo")
    }
    try:
        return native.HessianAccumulator.from_state(cast(Any, {**state, **limbs}))
    except (LoopqError, KeyError, TypeError, ValueError) as cause:
        raise DumpError(f"{where}: damaged Hessian state: {cause}") from cause


def write_accumulator(path: Path, acc: native.HessianAccumulator) -> str:
    """Write the exact state of a finished accumulator; return the SHA-256 of the file.

    Everything but the arrays is JSON under the metadata key "loopq_hessian".
    """
    arrays, state = accumulator_parts(acc)
    return write_tensors(path, arrays, {"loopq_hessian": json.dumps(state, sort_keys=True)})


def read_accumulator(path: Path) -> native.HessianAccumulator:
    """Read the exact state of an accumulator.

    Raises
    ------
    DumpError
        Not such a file, truncated, or with a state that cannot be.
    """
    _, metadata = read_header(path, DumpError)
    try:
        state: dict[str, Any] = dict(json.loads(metadata["loopq_hessian"]))
    except (KeyError, ValueError, TypeError) as cause:
        raise DumpError(f"{path}: not a Hessian file of loopq") from cause
    return accumulator_from(read_tensors(path, DumpError), state, str(path))


def merge(parts: Sequence[Path], out: Path) -> Manifest:
    """Add Hessian dumps that were collected apart.

    Parameters
    ----------
    parts : sequence of Path
        Hessian dumps of the same model, system, depth and steps.
    out : Path
        New dump. The sum is of integers, so that the order of the parts changes no bit of it.

    Raises
    ------
    DumpError
        Parts that do not fit together, or the same calibration tokens and seed twice.
    """
    from loopq.errors import ConfigError

    if len(parts) < 2:
        raise ConfigError("merge needs at least two parts")
    check_new(out, DumpError)
    ordered = sorted((Dump(p) for p in parts), key=lambda d: sha256(d.folder / "manifest.json"))
    _check_parts(ordered)
    first = ordered[0].manifest
    rows: Rows = {
        k: {t: sum(d.manifest.rows[k][t] for d in ordered) for t in v} for k, v in first.rows.items()
    }
    calibration = {
        "source": "merged",
        "parts": [d.manifest.calibration | {"seed": d.manifest.seed} for d in ordered],
        "n_prompts": sum(int(d.manifest.calibration["n_prompts"]) for d in ordered),
        "n_tokens": sum(int(d.manifest.calibration["n_tokens"]) for d in ordered),
    }
    model = ordered[0].folder / "model"
    n_bytes = sum(int(e["n_bytes"]) for e in first.files) + sum(f.stat().st_size for f in model.rglob("*"))
    with new_folder(out, n_bytes, DumpError) as folder:
        files = [_sum_of(entry, ordered, folder) for entry in first.files]
        shutil.copytree(model, folder / "model")
        merged = dataclasses.replace(first, rows=rows, files=tuple(files), calibration=calibration)
        merged.write(folder)
    return merged


def _sum_of(entry: dict[str, Any], parts: Sequence[Dump], out: Path) -> dict[str, Any]:
    """Write the sum of one input group's Hessians; return its line of the manifest."""
    total = read_accumulator(parts[0].folder / entry["file"])
    for other in parts[1:]:
        match = next(e for e in other.manifest.files if e["leader"] == entry["leader"])
        total.merge(read_accumulator(other.folder / match["file"]))
    path = out / entry["file"]
    digest = write_accumulator(path, total)
    return {**entry, "sha256": digest, "n_bytes": path.stat().st_size}


def _check_parts(dumps: Sequence[Dump]) -> None:
    first = dumps[0].manifest
    seen: dict[tuple[str, int], Path] = {}
    for dump in dumps:
        m = dump.manifest
        if m.kind != "hessian":
            raise DumpError(f"{dump.folder}: a dump of rows; only Hessian dumps are merged")
        for what in ("system", "n_steps", "parameters", "leaders", "model", "ties"):
            if getattr(m, what) != getattr(first, what):
                raise DumpError(f"{dump.folder}: its {what} differ from those of {dumps[0].folder}")
        if {k: sorted(v) for k, v in m.rows.items()} != {k: sorted(v) for k, v in first.rows.items()}:
            raise DumpError(f"{dump.folder}: its steps differ from those of {dumps[0].folder}")
        for part in m.calibration.get("parts", [m.calibration | {"seed": m.seed}]):
            key = (str(part.get("sha256")), int(part["seed"]))
            if key in seen:
                raise DumpError(
                    f"{dump.folder}: the same tokens and seed as {seen[key]}: they would count twice"
                )
            seen[key] = dump.folder
