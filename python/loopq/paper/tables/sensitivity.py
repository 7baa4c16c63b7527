"""Li, Table 16: damage of each layer alone, and how two one-step measures rank the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopq.diagnose.sections.ablation import ablation
from loopq.paper.bench import Bench
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, Table
from loopq.report.style import short_names

TITLE = "Layers by three measures of sensitivity"


def measure(bench: Bench) -> dict[str, Any]:
    """Round each layer alone; measure random-direction gain and Hessian trace."""
    found = bench.head() | ablation(bench.context())
    return found | {"exposed": [p.name for p in bench.system.shared_parameters(bench.depth) if p.exposed]}


def show(founds: Sequence[Found]) -> Shown:
    """Layers by damage, with their places by the other measures."""
    rows, made = [], []
    for found in founds:
        places, key = found["table"]["places"], found["measure"]
        short = short_names(places)
        order = sorted(places, key=lambda name: places[name]["ablation"])
        for name in order:
            p = places[name]
            cells = (p["random-direction gain"], p["Hessian trace"], p["ablation per channel"])
            damage = f"{100 * found['layers'][name][key]:.2f} %"
            rows.append(
                (found["model"], short[name], damage, *(None if c is None else str(c) for c in cells))
            )
        rho = found["table"]["spearman"]["random-direction gain"]
        if rho is not None:
            text = "the gain of random directions does not rank the layers as their damage does"
            made.append(Claim(found["model"], text, rho < 0.5, f"Spearman correlation {rho:+.2f}"))
        for name in found["exposed"]:
            p = places[name]
            numbers = (
                f"place {p['ablation']} of {len(places)} in groups, {p['ablation per channel']} per channel"
            )
            text = f"{short[name]} does the most damage when rounded alone per channel"
            made.append(Claim(found["model"], text, p["ablation per channel"] == 1, numbers))
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
    return Shown([Table(TITLE, text, header, tuple(rows))], made)


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
