"""Li, Fig. 3 and Sec. 5: agreement with full precision at every step, for several calibration steps."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.analysis.diagnosis.rollouts import run_variants
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, CALIBRATION, ONE, RTN, curves, higher, three, without_logits
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object
from loopq.systems.stepwise import steps_of

TITLE = "Agreement by step"


def measure(bench: Bench) -> Object:
    """Run full precision and the three variants of the main table from the same states."""
    weights = {n: {k: q.dequantize() for k, q in bench.solve(c).items()} for n, c in three(bench).items()}
    comparisons = run_variants(bench.context(), weights)
    return bench.head() | {"runs": {name: run.to_json() for name, run in comparisons.items()}}


def refuses(bench: Bench) -> str | None:
    """Predictions at every step need logits and single steps."""
    return without_logits(bench) or (
        None if steps_of(bench.system) else "the model has no single-step function"
    )


def show(results: Sequence[Found]) -> Shown:
    """Agreement after every step. The verdict uses the last one."""
    rows, claims, panels = [], [], []
    for result in results:
        runs = result["runs"]
        for name, run in runs.items():
            shown = ", ".join(f"{100 * a:.1f}" for a in run["agreement"])
            rows.append((result["model"], name, shown, f"{100 * run['agreement_pooled'][-1]:.1f} %"))
        panels.append(
            (result["model"], {n: (r["steps"], [100 * a for a in r["agreement"]]) for n, r in runs.items()})
        )
        for other in (RTN, ONE):
            more, less = (runs[name]["last"]["agreement"] for name in (ALL, other))
            text = f"{ALL} agrees at more positions than {other}"
            claims.append(higher(result["model"], text, more, less, CALIBRATION))
    text = "Top-1 agreement with full precision after 1, 2, ... steps, mean over prompts; pooled: over positions."
    header = ("model", "variant", "by step [%]", "last, pooled")
    axes = ("recurrence steps done [number]", "same top-1 prediction [%]")
    return Shown(
        [ShownTable(TITLE, text, header, tuple(rows))],
        claims,
        lambda: [curves(panels, "agreement", TITLE, text, axes)],
    )


TABLES.register("agreement")(
    PaperTable(
        ("Section 5",),
        TITLE,
        "Huginn, INT4 g128 after 32 steps: rounding 88.0 %, one step 88.2 %, all steps 92.5 %.",
        measure,
        show,
        refuses,
    )
)
