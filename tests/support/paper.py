"""Models and settings that the paper's tests measure at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import benches.zoo.models
from benches.zoo.store import save_model
from loopq.paper import run
from loopq.paper.bench import Bench, BenchSettings
from loopq.paper.models import open_source
from loopq.paper.run import Made
from loopq.paper.shown import TABLES
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent

SMALL = BenchSettings().changed(n_calibration=4, n_evaluation=3, n_prompts=2, seq_len=40, n_seeds=1)


TINY = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "block_size": 64}


def save(folder: Path, kind: str, **changes: Any) -> str:
    """Save a tiny untrained model and return its folder."""
    torch.manual_seed(0)
    save_model(benches.zoo.models.build({"model_type": f"loopq-zoo-{kind}", **TINY, **changes}), folder)
    return str(folder)


def bench(name: str, settings: BenchSettings = SMALL) -> Bench:
    return Bench(open_source(name), settings, Execution(threads=1, batch_size=4))


def main_table(name: str) -> dict[str, Any]:
    """The main table of a model on two calibration prompts for each of two seeds."""
    few = SMALL.changed(n_calibration=2, seq_len=24, n_seeds=2)
    return TABLES.get("main-table").measure(bench(name, few))


def found(**variants: Any) -> dict[str, Any]:
    rows = {
        name: {"kl": kl, "agreement": kl, "nll": kl, "answered": right, "n_bytes": 1}
        for name, (kl, right) in variants.items()
    }
    return {"model": "m", "output": "logits", "bytes_per_token": 1.0, "variants": rows}


def measured_shown_and_resumed(name: str, model: Bench, work: Path) -> Made:
    """Make a table of a model, look at all that it shows, and make it again from what was saved."""
    measured = run.make(name, [model], work, Silent())
    assert not measured.refused
    json.dumps(measured.to_json(), allow_nan=False)
    for table in measured.shown.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert all("nan" not in line for line in measured.lines())
    assert "<svg" in "".join(p.svg() for p in measured.shown.pictures()) or not measured.shown.pictures()
    assert run.make(name, [model], work, Silent()).to_json() == measured.to_json()
    return measured
