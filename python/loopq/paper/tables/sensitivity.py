"""Li, Table 16: damage of each layer alone, and the ranking of the layers by two one-step measures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loopq.analysis.report.style import short_names
from loopq.evaluation.stats import Interval
from loopq.paper.bench import Bench
from loopq.paper.compared import higher
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

#: Layers that the interval of a rank correlation needs: of fewer, not even that of no correlation excludes a half.
MIN_LAYERS = 17
TITLE = "Layers by three measures of sensitivity"


def measure(bench: Bench) -> Object:
    """Round each layer alone. Measure random-direction gain and Hessian trace."""
    ablation: Object = bench.alone["sections"]["ablation"]
    return bench.head() | ablation | {"exposed": [p.name for p in bench.context().exposed]}


def _fisher(rho: float, n: int) -> Interval:
    """95 % interval of a rank correlation by Fisher's transformation, variance 1.06 / (n - 3)."""
    half = 1.96 * float(np.sqrt(1.06 / max(n - 3, 1)))
    middle = np.arctanh(np.clip(rho, -1 + 1e-9, 1 - 1e-9))
    low, high = (float(end) for end in np.tanh([middle - half, middle + half]))
    return Interval(rho, low, high, 0.95, "Fisher's transformation", n)


def show(results: Sequence[Found]) -> Shown:
    """Layers by damage, with their places by the other measures."""
    rows, claims = [], []
    for result in results:
        places, key = result["table"]["places"], result["measure"]
        short = short_names(places)
        order = sorted(places, key=lambda name: places[name]["ablation"])
        for name in order:
            p = places[name]
            cells = (p["random-direction gain"], p["Hessian trace"], p["ablation per channel"])
            damage = f"{100 * result['layers'][name][key]:.2f} %"
            rows.append(
                (result["model"], short[name], damage, *(None if c is None else str(c) for c in cells))
            )
        rho = result["table"]["spearman"]["random-direction gain"]
        if rho is not None and len(places) >= MIN_LAYERS:
            text = "the gain of random directions does not rank the layers as their damage does"
            interval = _fisher(rho, len(places))
            numbers = f"Spearman correlation {rho:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
            claims.append(Claim(result["model"], text, numbers, interval, 0.5, below=True))
        alone = {name: layer["per_channel"] for name, layer in result["layers"].items()}
        for name in result["exposed"]:
            next_worst = max((n for n in alone if n != name), key=lambda n: float(alone[n][key]))
            text = f"{short[name]} does more damage than any other layer when rounded alone per channel"
            pair = (alone[name]["by_prompt"], alone[next_worst]["by_prompt"])
            claims.append(higher(result["model"], text, *pair, "layer", f"points beyond {short[next_worst]}"))
    text = (
        "Damage: share of predictions that change (of models without logits: error of the output) when this layer "
        "alone is rounded, mean over steps; the other columns are places, 1 for the most sensitive."
    )
    header = (
        "model",
        "layer",
        "damage",
        "by random-direction gain",
        "by Hessian trace",
        "by damage per channel",
    )
    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims)


TABLES.register("sensitivity")(
    PaperTable(
        ("Table 16",),
        TITLE,
        "Huginn, 17 projections: the adapter changes 11.8 % of the predictions, 2.3 times the next (5.1 %), yet is "
        "last by random-direction gain and third by Hessian trace.",
        measure,
        show,
    )
)
