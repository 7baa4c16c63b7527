"""Li, App. H and L: displacement of the rounded loop, and its prediction from one step at the final state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loopq.evaluation.stats import mean_interval
from loopq.layers.grid import PER_CHANNEL
from loopq.paper.bench import Bench
from loopq.paper.compared import N_RESAMPLES, most, span
from loopq.paper.diagnosis.displacement import predicted
from loopq.paper.diagnosis.exposed import rounded_exposed
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object
from loopq.systems.stepwise import steps_of

TITLE = "Displacement of the rounded loop, and its prediction"
#: A prediction is right where it is within this factor of what is measured.
FACTOR = 1.5


def measure(bench: Bench) -> Object:
    """Round per channel and in groups. Continue both loops, and predict their distance."""
    context = bench.context()
    sizes = {"per channel": PER_CHANNEL, "grouped": bench.settings.group_size}
    on = context.on(context.prompts)
    return bench.head() | {
        "rows": {name: predicted(on, rounded_exposed(context, size)) for name, size in sizes.items()}
    }


def refuses(bench: Bench) -> str | None:
    """Continuing a loop needs single steps."""
    return None if steps_of(bench.system) else "the model has no single-step function"


def show(results: Sequence[Found]) -> Shown:
    """Means over prompts."""
    rows, claims = [], []
    for result in results:
        for name, prompts in result["rows"].items():
            mean = {
                k: float(np.mean([p[k] for p in prompts]))
                for k in ("measured", "linear", "defect", "modulus")
            }
            bounds = [p["bound"] for p in prompts if p["bound"] is not None]
            bound = f"{np.mean(bounds):.3g} ({len(bounds)})" if bounds else None
            rows.append((result["model"], name, *(f"{v:.3g}" for v in mean.values()), bound))
            ratios = np.array([p["linear"] / p["measured"] for p in prompts if p["measured"] > 0])
            if len(ratios) > 1:
                off = mean_interval(np.maximum(ratios, 1 / ratios), n_resamples=N_RESAMPLES)
                text = f"{name}: one step predicts the displacement within a factor of {FACTOR}"
                claims.append(Claim(result["model"], text, f"off by {span(off, 2)}", off, FACTOR, below=True))
            if bounds:
                kept = [p["measured"] <= p["bound"] for p in prompts if p["bound"] is not None]
                claims.append(
                    most(result["model"], f"{name}: the bound of a contraction is kept", kept, "", "prompts")
                )
    text = (
        "Distance of the states after as many further updates as the depth; predicted: the error of one step at the "
        "final state, summed through its Jacobian, which tends to (I - J)^-1; bound: that error over 1 minus the norm "
        "of J, with the number of prompts where that is below 1."
    )
    header = ("model", "rounding", "measured", "predicted", "error of one step", "norm of J", "bound")
    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims)


TABLES.register("displacement")(
    PaperTable(
        ("Appendix H", "Appendix L"),
        TITLE,
        "R-Llama, 32 further updates: final displacement 1082 per channel and 300 in groups of 128, within 1 % after 4 "
        "updates. A contraction of modulus L is displaced by at most delta / (1 - L).",
        measure,
        show,
        refuses,
    )
)
