"""Models and settings that the paper's tests measure at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import benches.zoo.models
from benches.zoo.store import save_model
from loopq.paper import results
from loopq.paper.bench import Bench, BenchSettings
from loopq.paper.models import open_source
from loopq.paper.results import Made
from loopq.paper.shown import TABLES
from loopq.run.config import QuantConfig
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


def difference(model: Bench, first: QuantConfig, second: QuantConfig) -> str:
    """Return what differs in two treatments of a model's layers: one thing, or several with "and" between them."""
    plans = [{t.parameter.name: t for t in model.collected.plan(c).tasks} for c in (first, second)]
    names = {name for plan in plans for name in plan}

    def treated(plan: Any, config: QuantConfig, name: str) -> dict[str, object]:
        if name not in plan:
            return {"precision": "full"}
        how, steps = plan[name].config, plan[name].steps
        weighed = (
            how.method.name,
            *((tuple(steps), how.calibration.step_weights) if how.method.name != "rtn" else ()),
        )
        return {
            "calibration": (*weighed, config.inputs.name), "rotation": how.rotation, "group size": how.grid.group_size,
            "grid": how.grid.changed(group_size=8),
        }  # fmt: skip

    where: dict[str, set[str]] = {}
    for name in names:
        a, b = (treated(plan, config, name) for plan, config in zip(plans, (first, second), strict=True))
        for what in ("precision",) if "precision" in a or "precision" in b else a:
            if a.get(what) != b.get(what):
                where.setdefault(what, set()).add(name)
    adapters = set(model.adapters)
    places = {
        frozenset(names): "",
        frozenset(adapters): " of the adapter",
        frozenset(names - adapters): " of the core",
    }
    return " and ".join(what + places.get(frozenset(of), " of some layers") for what, of in where.items())


def found(**variants: Any) -> dict[str, Any]:
    rows = {
        name: {"kl": kl, "agreement": kl, "nll": kl, "answered": right, "n_bytes": 1}
        for name, (kl, right) in variants.items()
    }
    return {"model": "m", "output": "logits", "bytes_per_token": 1.0, "variants": rows}


def measured_shown_and_resumed(name: str, model: Bench, work: Path) -> Made:
    """Make a table of a model, look at all that it shows, and make it again from what was saved."""
    measured = results.make(name, [model], work, Silent())
    assert not measured.refused
    json.dumps(measured.to_json(), allow_nan=False)
    for table in measured.shown.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert all("nan" not in line for line in measured.lines())
    # A verdict on two names what differs between them.
    assert all(c.differs for c in measured.shown.claims if c.pair or " than " in c.text)
    assert "<svg" in "".join(p.svg() for p in measured.shown.pictures()) or not measured.shown.pictures()
    assert results.make(name, [model], work, Silent()).to_json() == measured.to_json()
    return measured
