"""Compare quantized weights: KL and bytes of every set of weights."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from loopq.analysis.report.markup import Cell, bar, number, paragraph, table
from loopq.terminal.table import size

Summary = Mapping[str, Any]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 480, 300, 62, 46


def facts(measured: Mapping[str, Any]) -> str:
    """Return the figures of one set of weights in large type. Empty for several sets, which have a table."""
    reference, *quantized = measured["weights"]
    if len(quantized) != 1:
        return ""
    summary, shown = quantized[0], []
    _, name, unit = _measure(reference)
    interval = summary.get("kl_95")
    between = f", 95 % interval {interval[0]:.5f} to {interval[1]:.5f}" if interval else ""
    shown.append((f"{summary['kl']:.5f}", f"{name}{unit}{between}"))
    if reference["output"] != "hidden":
        shown.append(
            (f"{100 * summary['agreement']:.2f} %", "of tokens have the same most probable next token")
        )
        shown.append((f"{summary['perplexity']:.4f}", f"perplexity, {reference['perplexity']:.4f} before"))
    if summary.get("n_bytes") and reference.get("n_bytes"):
        share = 100 * summary["n_bytes"] / reference["n_bytes"]
        shown.append(
            (size(summary["n_bytes"]), f"all weights, {share:.0f} % of {size(reference['n_bytes'])} before")
        )
    cells = "".join(
        f"<div><dt>{html.escape(what)}</dt><dd>{html.escape(value)}</dd></div>" for value, what in shown
    )
    return f'<dl class="facts">{cells}</dl>'


def _measure(reference: Summary) -> tuple[str, str, str]:
    """Head, name and unit of the distance from full precision."""
    if reference["output"] == "hidden":
        return "squared relative error", "squared relative error of the output", ""
    return "KL [nats per token]", "KL to full precision", " in nats per token"


def comparison(label: str, summaries: Sequence[Summary]) -> str:
    """Return a table of measurements with a bar for each divergence."""
    hidden = summaries[0]["output"] == "hidden"
    most = max((s["kl"] for s in summaries if math.isfinite(s["kl"])), default=0.0) or 1.0
    heads = ["weights", _measure(summaries[0])[0], ""]
    intervals = any(s.get("kl_95") for s in summaries)
    heads += ["95 % interval"] if intervals else []
    heads += ["cosine"] if hidden else ["same token [%]", "bits per byte"]
    rows: list[list[Cell | str]] = []
    for s in summaries:
        row = [Cell(html.escape(s["name"])), number(s["kl"], ".5f"), bar(s["kl"] / most)]
        if intervals:
            ends = s.get("kl_95")
            row.append(Cell(f"{ends[0]:.5f} to {ends[1]:.5f}" if ends else "-", "number"))
        if hidden:
            row.append(number(s["agreement"], ".5f"))
        else:
            row += [number(100 * s["agreement"], ".2f"), number(s["bits_per_byte"], ".4f")]
        rows.append([*row, Cell(size(s["n_bytes"]) if s.get("n_bytes") else "-", "number")])
    return table(label, [*heads, "bytes"], rows)


def alternatives(measured: Mapping[str, Any]) -> str:
    """Return the table of all weights, and KL against bytes if there are two sets or more."""
    summaries = measured["weights"]
    hidden = summaries[0]["output"] == "hidden"
    what = (
        "Squared relative error and cosine: of the output, against full precision"
        if hidden
        else "KL: how far the predicted distribution is from that of full precision, mean over tokens; same token: "
        "share of positions with the same most probable next token"
    )
    note = paragraph(f"{what}; interval: bootstrap over prompts. Shorter bars are better.")
    return note + comparison("Measurements", summaries) + _plot(summaries)


def _plot(summaries: Sequence[Summary]) -> str:
    """KL against bytes: a point for each set of weights with known bytes."""
    points = [
        (s["n_bytes"], s["kl"], s["name"])
        for s in summaries[1:]
        if s.get("n_bytes") and math.isfinite(s["kl"])
    ]
    if len(points) < 2:
        return ""
    head = _measure(summaries[0])[0]
    x_ticks, y_ticks = (_ticks(max(p[i] for p in points) or 1.0) for i in (0, 1))
    # Names appear to the right of their points.
    wide, high = 0.74 * (_WIDTH - _LEFT), _HEIGHT - _BOTTOM - 26

    def place(n_bytes: float, kl: float) -> tuple[float, float]:
        return _LEFT + n_bytes / x_ticks[-1] * wide, _HEIGHT - _BOTTOM - kl / y_ticks[-1] * high

    marks = []
    for value in y_ticks:
        _, y = place(0, value)
        marks.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH}"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in x_ticks:
        x, _ = place(value, 0)
        shown = "0" if not value else size(value).replace(".00", "")
        marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{shown}</text>')
    taken: list[tuple[float, float]] = []
    for n_bytes, kl, name in sorted(points, key=lambda p: p[1]):
        x, y = place(n_bytes, kl)
        at = y + 4
        while any(abs(at - other) < 16 and abs(x - column) < 110 for column, other in taken):
            at -= 4
        taken.append((x, at))
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
        marks.append(f'<text x="{x + 11:.1f}" y="{at:.1f}" class="name">{html.escape(name)}</text>')
    label = html.escape("; ".join(f"{name}: {size(n)}, {kl:.5f}" for n, kl, name in points), quote=True)
    return (
        f'<figure class="scatter"><h3>{html.escape(head.split(" [")[0])} against bytes</h3>'
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(marks)}'
        f'<text x="0" y="12">{html.escape(head)}</text>'
        f'<text x="{_LEFT + wide / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">bytes of all weights</text></svg>'
        "<figcaption>Both axes start at zero. Lower and further left is better: of two points at the same height, "
        "the left one does as well with fewer bytes.</figcaption></figure>"
    )


def _ticks(most: float) -> list[float]:
    """Round numbers from zero to the first one that is at least `most`."""
    scale = 10.0 ** math.floor(math.log10(most))
    step = next(s * scale for s in (0.2, 0.5, 1.0, 2.0, 5.0) if most <= 5 * s * scale)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]
