"""Add Hessian dumps that were collected separately."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopq.calibrate.dump import MANIFEST, Dump, DumpFile, Manifest, Rows
from loopq.calibrate.sums_file import write_accumulator
from loopq.errors import ConfigError, DumpError
from loopq.storage.files import sha256
from loopq.storage.folders import new_folder
from loopq.storage.lock import new_or_same
from loopq.terminal.progress import Progress


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
    single = [manifest.calibration | {"seed": manifest.seed}]
    return list(manifest.calibration.get("parts", single))


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
