"""Li, Fig. 4: a drawing of the recurrence with its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from loopq.analysis.report.loopfigure import draw
from loopq.analysis.report.style import short_names
from loopq.paper.bench import Bench
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "The loop and its layers"


def measure(bench: Bench) -> Object:
    """List the layers of a step, and measure the damage of each one alone. It colours the drawing."""
    return bench.head() | {"drawing": {k: bench.alone[k] for k in ("model", "layers")}}


def show(results: Sequence[Found]) -> Shown:
    """One drawing per model."""
    rows, lines = [], []
    for result in results:
        layers = result["drawing"]["layers"]
        short = short_names([layer["name"] for layer in layers])
        exposed = [layer["name"] for layer in layers if layer["exposed"]]
        for layer in layers:
            shape = "x".join(map(str, layer["shape"]))
            path = "no" if layer["exposed"] else "yes"
            cells = (shape, layer["role"], str(layer["invocations"]), path)
            rows.append((result["model"], short[layer["name"]], *cells))
        numbers = ", ".join(short[n] for n in exposed) or "none"
        lines.append(f"{result['model']}: layers in the loop without an identity path: {numbers}.")
    text = "Layers of one step, in order; calls: times that a rollout runs the layer."
    header = ("model", "layer", "shape", "role", "calls", "identity path")

    def pictures() -> list[Any]:
        drawn = [(f["model"], draw(f["drawing"])) for f in results]
        return [dataclasses.replace(p, name=f"loop-{i}", title=n) for i, (n, p) in enumerate(drawn)]

    return Shown([ShownTable(TITLE, text, header, tuple(rows))], (), pictures, lines)


TABLES.register("loop")(
    PaperTable(
        ("Figure 4",),
        TITLE,
        "Huginn: the adapter maps state and embedding back to the model's width with no identity path; the four core "
        "blocks have residual paths.",
        measure,
        show,
    )
)
