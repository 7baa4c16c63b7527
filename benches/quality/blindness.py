"""Hold the verdict on one-step calibration against the main table: ``python -m benches.quality.blindness RECORD.json``.

For every model of the record: the geometric mean over layers of what the one-step solution loses over the trajectory
relative to rounding, and the ratio of KL that was measured. The verdict is right where both are on one side of 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benches.zoo.register  # noqa: F401  registers the classes
from benches.zoo import WEIGHTS
from loopq.diagnose.blindness import ONE, RTN, model_ratio
from loopq.diagnose.sections import ranks
from loopq.execution import Execution
from loopq.reproduce.bench import Bench, BenchSettings
from loopq.reproduce.models import data_folder, open_source
from loopq.table import render


def predicted(name: str, sizes: BenchSettings) -> float | None:
    """Return the ratio that `loopq diagnose` would give for a model of the record."""
    known = WEIGHTS / name
    bench = Bench(open_source(str(known) if known.is_dir() else name, data_folder(None)), sizes, Execution())
    context = bench.context(bench.model.calibration, bits=sizes.bits, group_size=sizes.group_size)
    found = ranks(context)
    return model_ratio(list(found["solved"].values()), ONE, RTN)


def row(model: dict[str, Any], sizes: BenchSettings) -> tuple[Any, ...]:
    """Return name, predicted ratio, measured ratio with its interval, and whether they agree."""
    grids = {(g["bits"], g["group_size"]): g for g in model["grids"]}
    measured = grids[sizes.bits, sizes.group_size]["ratios"]["one step / RTN"]
    ratio = predicted(model["model"], sizes)
    level = measured["low"] <= 1 <= measured["high"]
    # A model that runs every layer once has no step to miss.
    right = "level" if level else ((ratio or 0.0) > 1) == (measured["estimate"] > 1)
    interval = f"[{measured['low']:.2f}, {measured['high']:.2f}]"
    shown = None if ratio is None else f"{ratio:.3f}"
    return model["model"], shown, f"{measured['estimate']:.2f}", interval, right


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "record", type=Path, help="main-table-DATE.json, its models under the names they have here"
    )
    parser.add_argument("--n-prompts", type=int, default=16)
    args = parser.parse_args()
    sizes = BenchSettings().changed(n_calibration=args.n_prompts)
    models = json.loads(args.record.read_text(encoding="utf-8"))["models"]
    rows = [row(m, sizes) for m in models]
    print(render(("model", "predicted", "KL, one step / RTN", "95 %", "right"), rows))


if __name__ == "__main__":
    main()
