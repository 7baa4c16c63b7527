"""Directions of the state shared by steps and seeds."""

from __future__ import annotations

from loopq.analysis.report.markup import Cell, described, number
from loopq.analysis.report.sections import TABLES, Diagnosis, Part


def overlaps(d: Diagnosis) -> str:
    results = (d["sections"].get("overlap") or {}).get("overlaps")
    if not results:
        return ""
    rows: list[list[Cell | str]] = [
        [
            r["between"],
            number(r["k"], "d"),
            number(100 * r["overlap"], ".2f"),
            number(100 * r["chance"], ".2f"),
        ]
        for r in sorted(results, key=lambda r: r["k"])
    ]
    caption = (
        "Mean squared cosine between the leading directions of the state, and its expectation for two independent "
        "spaces of that dimension. An overlap at chance means that one side is noise."
    )
    heads = ("between", "directions", "overlap [%]", "chance [%]")
    return described("Do steps share their directions?", caption, heads, rows)


TABLES.register("overlap")(Part(overlaps, 40))
