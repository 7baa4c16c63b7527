"""The process of an engine: `python -m loopq.formats.engines FOLDER...` answers the question in each folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import STDERR, Reading, compared


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Write the standard error of this process to a file, with what native libraries write."""
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def answer(work: Path) -> Reading:
    """Load the file in the engine and compare its logits. Any error of the engine is an answer."""
    job = json.loads((work / "job.json").read_text("utf-8"))
    engine = ENGINES.get(job["engine"])
    name = engine.version(job["format"])
    with np.load(work / "question.npz") as question:
        ids, expected, states = question["ids"], question["expected"], question.get("states")
    try:
        with _kept(work / STDERR):
            logits, positions, kind = engine.logits(Path(job["path"]), ids, job["trust"], states)
    except Exception as cause:  # noqa: BLE001  # what an engine raises on a file is what is asked
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        # A class that takes no first state cannot be compared.
        skipped = any(word in text for word in ("trust_remote_code", "input_states"))
        said = engine.cause((work / STDERR).read_text("utf-8", "replace"))
        return Reading(name, problem=text[:300] + f" ({said[:300]})" * bool(said), skipped=skipped)
    return compared(name, logits, expected[:, list(positions)], kind, job["slack"])


if __name__ == "__main__":
    for place in map(Path, sys.argv[1:]):
        (place / "answer.json").write_text(json.dumps(dataclasses.asdict(answer(place))), "utf-8")
