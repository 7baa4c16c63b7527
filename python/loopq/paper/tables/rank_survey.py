"""Li, Fig. 2 and Table 18: rank gain of every model, and the gap that trajectory calibration closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE, RTN, below, closed, grown, three
from loopq.paper.main_table import rank_survey
from loopq.paper.scatter import gain_scatter
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, Table

TITLE = "Rank survey and recovery"
HEADER = ("model", "bottleneck", "rank at step 0", "largest gain", "of", "one step against RTN", "gap closed")


def measure(bench: Bench) -> dict[str, Any]:
    """Count ranks, and quantize into the three variants of the main table."""
    survey = rank_survey(bench.sums, bench.collected.job.selection, bench.execution.threads)
    return bench.measure(three(bench)) | {"ranks": survey}


def _row(found: Found) -> dict[str, Any]:
    layers = {layer["layer"]: layer for layer in found["ranks"]["layers"]}
    low = layers[found["ranks"]["bottleneck"]]
    top = max(layers.values(), key=lambda layer: layer["gain"] or 0.0)
    one_step = below(found, ONE, RTN)
    return {
        "name": found["model"],
        "bottleneck": low["class"],
        "step0": low["first"] / low["n_inputs"],
        "gain": top["gain"] or 1.0,
        "gain_of": top["class"],
        "one_step": {True: "better", False: "worse", None: "level"}[one_step.holds],
        "one_step_better": closed(found, ONE) > 0,
        "gap_closed": closed(found, ALL),
    }


def show(founds: Sequence[Found]) -> Shown:
    """One row and one point per model."""
    points = [_row(found) for found in founds]
    rows = tuple(
        (
            p["name"], p["bottleneck"], f"{100 * p['step0']:.2f} %", f"{p['gain']:.2f}x", p["gain_of"], p["one_step"],
            f"{100 * p['gap_closed']:.0f} %",
        )
        for p in points
    )  # fmt: skip
    made = []
    for found in founds:
        gains = [layer["gain"] for layer in found["ranks"]["layers"] if layer["gain"] is not None]
        text = "the inputs' ranks at least double over the trajectory"
        made.append(grown(found["model"], text, gains, [1.0] * len(gains), 2.0))
        made.append(below(found, ALL, RTN, "trajectory calibration closes part of the gap"))
    text = (
        "Bottleneck: the layers' input with the lowest rank at step 0 over its width; gain: rank of the sum of all "
        "steps over that of step 0; gap closed: share of the KL of rounding that trajectory calibration removes."
    )
    return Shown([Table(TITLE, text, HEADER, rows)], made, lambda: [gain_scatter(points)])


TABLES.register("rank-survey")(
    PaperTable(
        ("Figure 2", "Table 18"),
        TITLE,
        "Ten architectures: step-0 rank of the bottleneck 0.02 to 2.76 % of its width, largest gain 1.1x (COCONUT) to "
        "32.8x (LoopFormer), one step worse than rounding on five of nine, gap closed 17 to 102 %.",
        measure,
        show,
    )
)
