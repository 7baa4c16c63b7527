"""Li, Table 15: perturbations other than rounding, in the adapter and in the core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loopq.paper.bench import Bench
from loopq.paper.compared import higher, without_exposed
from loopq.paper.diagnosis.sections.perturbation import perturbations
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Perturbations other than rounding"


def measure(bench: Bench) -> Object:
    """Perturb adapter or core by updates of one norm and by noise of one output error, states paired."""
    return bench.head() | perturbations(bench.context())


def show(results: Sequence[Found]) -> Shown:
    """Agreement by kind and place, mean over seeds."""
    rows, claims = [], []
    for result in results:
        kinds = dict.fromkeys(r["perturbation"] for r in result["rows"])
        for kind in kinds:
            # By prompt, mean over seeds.
            same = {
                place: np.mean(
                    [
                        r["last"]["agreement"]
                        for r in result["rows"]
                        if (r["perturbation"], r["location"]) == (kind, place)
                    ],
                    axis=0,
                )
                for place in ("exposed", "core")
            }
            mean = {place: 100 * float(values.mean()) for place, values in same.items()}
            gap = mean["core"] - mean["exposed"]
            cells = (f"{mean['exposed']:.1f} %", f"{mean['core']:.1f} %", f"{gap:+.1f}")
            rows.append((result["model"], kind, *cells))
            text = f"{kind}: the adapter suffers more than the core"
            claims.append(higher(result["model"], text, same["core"], same["exposed"], "place of the error"))
    text = "Top-1 agreement with full precision after all steps; rank-4 updates have one norm at both places."
    header = ("model", "perturbation", "adapter", "core", "core - adapter [points]")
    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims)


TABLES.register("perturbation")(
    PaperTable(
        ("Table 15",),
        TITLE,
        "Huginn, adapter against core: trained rank-4 update 13.4 and 77.8 %, random rank-4 update 71.8 and 95.8 %, "
        "Gaussian noise of matched output error 89.3 and 96.5 %.",
        measure,
        show,
        without_exposed,
    )
)
