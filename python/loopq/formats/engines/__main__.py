"""The process of an engine: `python -m loopq.formats.engines FOLDER...` answers the question in each folder."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Reading, compared


def answer(work: Path) -> Reading:
    """Load the file in the engine and compare its logits. Any error of the engine is an answer."""
    job = json.loads((work / "job.json").read_text("utf-8"))
    engine = ENGINES.get(job["engine"])
    name = engine.version(job["format"])
    with np.load(work / "question.npz") as question:
        ids, expected, states = question["ids"], question["expected"], question.get("states")
    try:
        logits, positions, kind = engine.logits(Path(job["path"]), ids, job["trust"], states)
    except Exception as cause:  # noqa: BLE001  # what an engine raises on a file is what is asked
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        # A class that takes no first state cannot be compared.
        skipped = any(word in text for word in ("trust_remote_code", "input_states"))
        return Reading(name, problem=text[:300], skipped=skipped)
    return compared(name, logits, expected[:, list(positions)], kind, job["slack"])


if __name__ == "__main__":
    for place in map(Path, sys.argv[1:]):
        (place / "answer.json").write_text(json.dumps(dataclasses.asdict(answer(place))), "utf-8")
