"""Li, Algorithm 1 and Eq. 3: trajectory calibration, and the layer-wise loss that it minimises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loopq.analysis.diagnosis.sections.ranks import step_proxies
from loopq.analysis.diagnosis.weights import weight_of
from loopq.analysis.report.style import short_names
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, CALIBRATION, ONE, RTN, most, three
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Trajectory calibration, layer by layer"


def measure(bench: Bench) -> Object:
    """Sum tr(dW H_t dW^T) over the steps for rounding, one-step and trajectory solutions of every layer."""
    selection = bench.collected.job.selection
    observed = {p.name: p for p in selection.observed}
    solved = {name: bench.solve(config) for name, config in three(bench).items()}
    layers: Object = {}
    for name, p in observed.items():
        weight, h = weight_of(bench.system, p), bench.sums.accumulators[selection.input_groups[name]]
        losses = {}
        for variant, quantized in solved.items():
            if name in quantized:
                error = np.ascontiguousarray(quantized[name].dequantize() - weight, dtype=np.float32)
                losses[variant] = step_proxies(error, h).tolist()
        layers[name] = {"steps": p.invocations, "losses": losses}
    return bench.head() | {"layers": {n: la for n, la in layers.items() if len(la["losses"]) == len(solved)}}


def show(results: Sequence[Found]) -> Shown:
    """Loss over the trajectory relative to rounding, and at step 0 alone."""
    rows, claims = [], []
    for result in results:
        layers = result["layers"]
        short = short_names(layers)
        total = {n: {v: sum(x) for v, x in la["losses"].items()} for n, la in layers.items()}
        for name, la in layers.items():
            first = {v: x[0] / la["losses"][RTN][0] for v, x in la["losses"].items()}
            cells = [f"{first[v]:.3f}" for v in (ONE, ALL)] + [
                f"{total[name][v] / total[name][RTN]:.3f}" for v in (ONE, ALL)
            ]
            rows.append((result["model"], short[name], str(la["steps"]), *cells))
        looped = [n for n, la in layers.items() if la["steps"] > 1]
        for other, text in ((ONE, "that of one step"), (RTN, "rounding")) if looped else ():
            wins = [total[n][ALL] < total[n][other] for n in looped]
            text = f"over the trajectory its solution loses less than {text} in most layers"
            given = "the solver lowers this loss"
            claims.append(most(result["model"], text, wins, CALIBRATION, given=given))
    text = "tr(dW H dW^T) relative to rounding, H that of step 0 (left) and of all steps (right)."
    header = ("model", "layer", "steps", "step 0: one step", "all steps", "trajectory: one step", "all steps")
    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims)


TABLES.register("algorithm")(
    PaperTable(
        ("Algorithm 1",),
        TITLE,
        "H is summed over the N steps of the full-precision rollout, and each layer is solved once with it.",
        measure,
        show,
    )
)
