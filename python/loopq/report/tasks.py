"""Scores of tasks as a table."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.storage.schema import Object
from loopq.terminal.table import render, short


def task_table(rows: Sequence[Object]) -> str:
    """Return the table of tasks, with a line for each metric and set of weights, and notes on cut contexts."""

    def cells(row: Object, key: str) -> tuple[str | None, str | None]:
        found, share = row[key], row["sizes"] is None
        if found is None:
            return None, None
        change, unit = key == "change", 100 if share else 1
        value, low, high = (unit * found[end] for end in ("estimate", "low", "high"))
        if share:
            return f"{value:+.1f}" if change else f"{value:.1f} %", f"[{low:.1f}, {high:.1f}]"
        return f"x{value:.4f}" if change else f"{value:.4g}", f"[{low:.4g}, {high:.4g}]"

    table = [
        (
            r["task"],
            r["metric"],
            r["weights"],
            len(r["values"]),
            *cells(r, "interval"),
            *cells(r, "change"),
            short(r["p_value"]),
        )
        for r in rows
    ]
    header = ("task", "metric", "weights", "items", "value", "95 %", "change", "95 % ", "McNemar p")
    lines = [
        render(header, table),
        "95 %: Wilson's interval, of a perplexity bootstrap over items",
        "change: from the first weights on the same items, in points, of a perplexity the ratio; paired bootstrap over "
        "items, exact McNemar test",
    ]
    cut = {r["task"]: (r["n_cut"], len(r["values"])) for r in rows if r["n_cut"]}
    for task, (n_cut, n) in cut.items():
        lines.append(
            f"{task}: {n_cut} of {n} contexts are longer than the model reads and were cut at their left"
        )
    return "\n".join(lines)
