"""Locate the error: maps of every layer at every step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loopq.analysis.report.markup import Shades, heat_map, listed, paragraph, percent
from loopq.analysis.report.style import short_names

Rows = Mapping[str, Sequence[float | None]]


def error_maps(errors: Mapping[str, Any] | None, diagnosis: Mapping[str, Any] | None) -> str:
    """Return maps of measured errors, or else of the error that plain rounding would have.

    The latter needs a diagnosis with section "ranks". `errors` has "on" and "weights", as in
    `loopq.analysis.report.page.write_page`.
    """
    if errors:
        return _measured(errors)
    ranks = (diagnosis or {}).get("sections", {}).get("ranks") or {}
    if not ranks.get("outputs"):
        return ""
    settings = diagnosis["settings"]  # type: ignore[index]
    rows = {
        name: [
            (e / of) ** 0.5 if of > 0 else 0.0 for e, of in zip(values, ranks["outputs"][name], strict=True)
        ]
        for name, values in ranks["proxies"].items()
    }
    group = settings["group_size"]
    grid = f"INT{settings['bits']}, " + ("a scale for each row" if group == -1 else f"groups of {group}")
    note = (
        f"No weight has been quantized yet: this is what rounding each to nearest ({grid}) would do to its output at "
        "each step, for inputs of full precision. The rows that stand out are the weights that rounding hurts most; a "
        "row that changes from left to right has inputs that change from step to step."
    )
    shades = Shades.of(v for values in rows.values() for v in values)
    return paragraph(note) + heat_map("Error of each weight if rounded", _short(rows), shades)


def _measured(errors: Mapping[str, Any]) -> str:
    on = errors["on"]
    parts = [
        paragraph(
            f"Both models ran the same {on['n_prompts']} prompts of {on['source']}. Each number is the distance "
            "between the two outputs of a layer at one step, relative to the output of full precision. The first map "
            "is the error as it arrives: from the layer itself, the layers before it and the steps before. A row that "
            "rises from left to right collects error from step to step. The second map is what the layer's own "
            "quantized weight adds when its input is exact; the rows that stand out are the weights to give more "
            "bits. Steps count from 0."
        )
    ]
    maps = errors["weights"]
    values = {
        kind: [v for kinds in maps.values() for row in kinds[kind].values() for v in row]
        for kind in ("moved", "own")
    }
    shades = {kind: Shades.of(numbers) for kind, numbers in values.items()}
    for name, kinds in maps.items():
        before = f"{name}: " if len(maps) > 1 else ""
        parts += [
            listed([before + line for line in _reading(kinds)]),
            '<div class="maps">',
            heat_map(f"{before}Error as it arrives", _short(kinds["moved"]), shades["moved"]),
            heat_map(f"{before}Added by the weight itself", _short(kinds["own"]), shades["own"]),
            "</div>",
        ]
    return "\n".join(parts)


def _short(rows: Rows) -> dict[str, Sequence[float | None]]:
    short = short_names(rows)
    return {short[name]: values for name, values in rows.items()}


def _reading(kinds: Mapping[str, Rows]) -> list[str]:
    """Explain the two maps in sentences."""
    top = {name: max((v for v in row if v is not None), default=0.0) for name, row in kinds["own"].items()}
    worst = max(top, key=lambda name: top[name])
    lines = [
        f"{short_names(top)[worst]} adds most by itself: {percent(top[worst])}\u00a0% of its output at its worst step."
    ]
    ends = [(row[0], row[-1]) for row in kinds["moved"].values() if len(row) > 1]
    known = [(a, b) for a, b in ends if a is not None and b is not None]
    if known:
        first, last = (statistics.median(side) for side in zip(*known, strict=True))
        course = "grows" if last > 1.1 * first else "shrinks" if last < 0.9 * first else "stays level"
        lines.append(
            f"From the first to the last step the error {course}: {percent(first)}\u00a0% of a layer's output at step "
            f"0, {percent(last)}\u00a0% at the last (medians over the layers)."
        )
    return lines
