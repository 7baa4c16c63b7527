"""The folder of a dump while it is written, and dumps of rows."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import loopq._native as native
from loopq.calibrate.dump import MANIFEST, DumpFile, Manifest, MetricFile, Rows, rows_to_raw
from loopq.calibrate.inputs import differing
from loopq.calibrate.rollouts import Collection, run_rollouts
from loopq.errors import ConfigError, DumpError
from loopq.models.depths import Depths
from loopq.settings.execution import at_most
from loopq.storage.files import check_named, free_bytes, read_json, write_json, write_tensors
from loopq.storage.folders import check_new, remove_leftovers
from loopq.storage.lock import locked
from loopq.storage.model_files import model_tensors, write_files
from loopq.storage.schema import Count, Sha256, checked
from loopq.terminal.table import size

if TYPE_CHECKING:
    from torch import Tensor

CLAIM = "collecting.json"
ROW_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class _ShardJournal:
    sha256: Sha256
    n_bytes: Count
    batches: tuple[Count, Count]
    rows: Rows


@dataclass(frozen=True)
class _Claim:
    key: str
    inputs: dict[str, str] = field(default_factory=dict)


def collect_rows(
    job: Collection, out: Path, *, rows_dtype: str | None = None, shard_batches: int = 8
) -> Manifest:
    """Write an activation dump. An interrupted dump is resumed.

    Parameters
    ----------
    out : Path
        Folder of the dump. It must be new or hold the same unfinished dump.
    rows_dtype : {"float32", "float16", "bfloat16"}, optional
        Storage type of the rows. The default is the type of the activations, which needs no rounding.
    shard_batches : int
        Batches of one shard. A kill loses at most one shard.

    Raises
    ------
    DumpError
        `out` holds a finished dump or part of another dump, or another run is writing it.
    """
    kind = rows_dtype or str(next(job.system.model.parameters()).dtype).removeprefix("torch.")
    if kind not in ROW_TYPES:
        raise ConfigError(f"rows_dtype must be one of {', '.join(ROW_TYPES)}; got {kind!r}")
    if shard_batches < 1:
        raise ConfigError(f"shard_batches must be at least 1; got {shard_batches}")
    with alone(out):
        return _write_rows(job, out, kind, shard_batches)


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Lock a folder for a single collection. Ranks that divide one collection use claims instead."""
    check_named(out, DumpError)
    with locked(out):
        yield
    # After the lock: a kill before it leaves the claim, which tells the same command that the dump is its own.
    release(out)


def _write_rows(job: Collection, out: Path, kind: str, shard_batches: int) -> Manifest:
    key = job.fingerprint(kind, shard_batches)
    if begin_dump(out, key, job.inputs):
        return finish_dump(out)
    written = sum(path.stat().st_size for path in (out / "shards").glob("*.safetensors"))
    need, free = _rows_bytes(job, kind), free_bytes(out)
    if need - written > free:
        raise DumpError(
            f"{out}: the rows take {size(need)}, {size(written)} of them are there, the disk has {size(free)}; free "
            "some space, take fewer prompts, or keep Hessians instead (--hessian)"
        )
    claim(out, key, job.inputs)
    # A shard is held as it comes, and once more as it is written.
    shard = (need + _rows_bytes(job, "float32")) * min(1, shard_batches / job.n_batches)
    rows = f"about {need / 2**20:.1f} MiB of rows for {job.tokens.n_tokens} tokens"
    job.execution.progress.note(f"{rows}; {at_most(int(shard))}")
    done = _finished_shards(out)
    buffer: dict[str, list[Tensor]] = {}

    def sink(input_group: str, step: int, rows: Tensor) -> None:
        buffer.setdefault(f"{input_group}/{step}", []).append(rows.detach().clone())

    for number in run_rollouts(job, sink, wanted=lambda number: number >= done * shard_batches):
        if (number + 1) % shard_batches == 0 or number + 1 == job.n_batches:
            index = number // shard_batches
            _write_shard(out, index, (index * shard_batches, number + 1), buffer, ROW_TYPES[kind])
            buffer.clear()
    return _finish_rows(job, out, ROW_TYPES[kind])


def _rows_bytes(job: Collection, kind: str) -> int:
    shares = job.selection.shares
    width = sum(
        p.in_features * p.invocations * shares.get(p.name, 1.0) for p in job.selection.distinct_inputs
    )
    return int(job.tokens.n_tokens * width) * (4 if kind == "float32" else 2)


def claim(out: Path, key: str, inputs: Mapping[str, str]) -> None:
    """Note whose the unfinished dump in a folder is."""
    write_json(out / CLAIM, {"key": key, "inputs": dict(inputs)})


def begin_dump(out: Path, key: str, inputs: Mapping[str, str]) -> bool:
    """Whether the folder holds this finished dump, killed during its final clean-up.

    Any other collection in the folder is an error, which names the inputs that differ.
    """
    check_named(out, DumpError)
    file = out / CLAIM
    if file.is_file():
        there = checked(_Claim, read_json(file, DumpError), file, DumpError)
        if there.key != key:
            names = ", ".join(differing(there.inputs, inputs)) if there.inputs else ""
            changed = f" ({names or 'other options'} changed since)"
            raise DumpError(
                f"{out}: holds the beginnings of another collection{changed}; choose a new folder or remove it"
            )
        for folder in (out, out / "shards", out / "hessians", out / "metrics", out / "model"):
            remove_leftovers(folder)
    elif (out / MANIFEST).exists():
        raise DumpError(f"{out}: holds a finished dump; choose a new folder")
    else:
        # A kill may have interrupted the write of the claim itself.
        remove_leftovers(out)
        check_new(out, DumpError)
    return (out / MANIFEST).exists()


def finish_dump(out: Path) -> Manifest:
    """Remove the files that only an unfinished collection needs, except the claim."""
    shutil.rmtree(out / "work", ignore_errors=True)
    return Manifest.read(out)


def release(out: Path) -> None:
    """Remove the claim of a complete dump, which is the last step of a collection."""
    (out / CLAIM).unlink(missing_ok=True)


def collected(out: Path) -> bool:
    """Whether a dump exists and its clean-up is complete."""
    return (out / MANIFEST).exists() and not (out / CLAIM).exists()


def _finished_shards(out: Path) -> int:
    count = 0
    while (out / "shards" / f"{count:05d}.json").is_file():
        count += 1
    return count


def _write_shard(
    out: Path, index: int, batches: tuple[int, int], buffer: Mapping[str, list[Tensor]], dtype: str
) -> None:
    import torch  # lazy: loopq imports without torch

    tensors = {name: rows_to_raw(torch.cat(parts), dtype) for name, parts in buffer.items()}
    path = out / "shards" / f"{index:05d}.safetensors"
    digest = write_tensors(path, tensors)
    rows: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        input_group, _, step = name.rpartition("/")
        rows.setdefault(input_group, {})[step] = tensor.shape[0]
    journal = {"sha256": digest, "n_bytes": path.stat().st_size, "batches": list(batches), "rows": rows}
    write_json(path.with_suffix(".json"), journal)


def _finish_rows(job: Collection, out: Path, dtype: str) -> Manifest:
    # A shard has no rows for a step that sent none to an expert.
    rows: Rows = {
        p.name: dict.fromkeys(range(p.invocations) if p.routed_in else (), 0)
        for p in job.selection.distinct_inputs
    }
    files = []
    for path in sorted((out / "shards").glob("*.json")):
        journal = checked(_ShardJournal, read_json(path, DumpError), path, DumpError)
        files.append(DumpFile(f"shards/{path.stem}.safetensors", journal.sha256, journal.n_bytes))
        for input_group, steps in journal.rows.items():
            if input_group not in rows:
                raise DumpError(f"{path}: rows of {input_group!r}, which is not collected here")
            for step, n in steps.items():
                rows[input_group][step] = rows[input_group].get(step, 0) + n
    return write_manifest(job, out, "rows", dtype, rows, files)


def write_manifest(
    job: Collection,
    out: Path,
    kind: Literal["rows", "hessian"],
    dtype: str,
    rows: Rows,
    files: Sequence[DumpFile],
    metrics: Sequence[MetricFile] = (),
) -> Manifest:
    tensors, ties = model_tensors(job.system.model)
    manifest = Manifest(
        kind=kind,
        system=job.system.name,
        n_steps=job.selection.n_steps,
        seed=job.execution.seed,
        calibration=job.tokens.describe(),
        rows_dtype=cast(Any, dtype),
        parameters=job.selection.parameters,
        input_groups=job.selection.input_groups,
        rows=rows,
        files=tuple(files),
        model=tuple(write_files(out / "model", tensors, job.side_files)),
        ties=ties,
        loopq_version=native.__version__,
        metrics=tuple(metrics),
        depths=job.system.depths if isinstance(job.system, Depths) else (),
    )
    manifest.write(out)
    return finish_dump(out)
