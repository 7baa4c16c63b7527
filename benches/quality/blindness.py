"""Hold the verdict on one-step calibration against the main table: ``python -m benches.quality.blindness RECORD.json``.

For every model of the record: the geometric mean over layers of what the one-step solution loses over the trajectory
relative to rounding, and the ratio of KL that was measured. The verdict is right where both are on one side of 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benches.zoo.register  # noqa: F401  registers the classes
from benches.zoo import WEIGHTS
from loopq.diagnose.blindness import ONE, RTN, model_ratio
from loopq.diagnose.sections import ranks
from loopq.paper.bench import Bench, BenchSettings
from loopq.paper.models import data_folder, open_source
from loopq.settings.execution import Execution
from loopq.terminal.table import render


@dataclass(frozen=True)
class Judged:
    """The verdict on one model beside what was measured.

    Parameters
    ----------
    name : str
        The model.
    layers : sequence of mapping or None
        Losses of each layer, as `loopq.diagnose.blindness.solved_losses` gives them.
    low, high, estimate : float
        Measured ratio of KL, one step over rounding, with its 95 % interval.
    """

    name: str
    layers: Sequence[Mapping[str, float] | None]
    low: float
    high: float
    estimate: float

    @property
    def predicted(self) -> float | None:
        """The ratio that `loopq diagnose` gives; None where every layer runs once: there is no step to miss."""
        return model_ratio(self.layers, ONE, RTN)

    @property
    def truth(self) -> int:
        """1: one-step calibration is significantly worse than rounding, -1: better, 0: level."""
        return int(self.low > 1) - int(self.high < 1)

    @property
    def right(self) -> bool | None:
        """Whether the verdict says what was measured; None where that is level."""
        return None if not self.truth else ((self.predicted or 0.0) > 1) == (self.truth > 0)

    def row(self) -> tuple[Any, ...]:
        """Cells of the table."""
        blind = sum(x[ONE] > x[RTN] for x in self.layers if x)
        shown = None if self.predicted is None else f"{self.predicted:.3f}"
        right = {None: "level", True: "yes", False: "no"}[self.right]
        interval = f"[{self.low:.2f}, {self.high:.2f}]"
        return self.name, f"{blind} of {len(self.layers)}", shown, f"{self.estimate:.2f}", interval, right


def judge(model: dict[str, Any], sizes: BenchSettings) -> Judged:
    """Diagnose a model of the record."""
    name = model["model"]
    known = WEIGHTS / name
    bench = Bench(open_source(str(known) if known.is_dir() else name, data_folder(None)), sizes, Execution())
    context = bench.context(bench.model.calibration, bits=sizes.bits, group_size=sizes.group_size)
    grids = {(g["bits"], g["group_size"]): g for g in model["grids"]}
    measured = grids[sizes.bits, sizes.group_size]["ratios"]["one step / RTN"]
    return Judged(name, list(ranks(context)["solved"].values()), **measured)


def summary(found: Sequence[Judged]) -> str:
    """Say on how many models the verdict is right, its sensitivity and its specificity."""
    rights = [x.right for x in found]
    worse, better = ([x.right for x in found if x.truth == sign] for sign in (1, -1))
    return (
        f"right on {rights.count(True)} of {len(found)} models, wrong on {rights.count(False)}, level on "
        f"{rights.count(None)}; sensitivity {sum(map(bool, worse))} of {len(worse)} models whose one-step calibration "
        f"is significantly worse than rounding, specificity {sum(map(bool, better))} of {len(better)} where it is "
        "significantly better"
    )


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
    found = [judge(m, sizes) for m in models]
    header = ("model", "blind layers", "predicted", "KL, one step / RTN", "95 %", "right")
    print(render(header, [x.row() for x in found]))
    print(summary(found))


if __name__ == "__main__":
    main()
