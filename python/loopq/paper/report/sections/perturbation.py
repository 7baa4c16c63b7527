"""Perturbations other than rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loopq.analysis.report.markup import Cell, described, number, percent_cell
from loopq.analysis.report.sections import TABLES, Diagnosis, Part


def perturbations(d: Diagnosis) -> str:
    results = d["sections"].get("perturbation")
    if not results:
        return ""
    logits = d["model"]["output"] != "hidden"
    key = "agreement" if logits else "output_error"
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in results["rows"]:
        groups.setdefault((row["perturbation"], row["location"]), []).append(row)
    rows: list[list[Cell | str]] = []
    for (kind, place), draws in sorted(groups.items()):
        mean = sum(draw[key] for draw in draws) / len(draws)
        norm = sum(draw["norm"] for draw in draws) / len(draws)
        rows.append([kind, place, number(norm), number(len(draws), "d"), percent_cell(mean)])
    caption = (
        "Weight changes other than rounding, at the exposed layers and in the core, with paired initial states. Rank-4 "
        "updates have the same norm at both places; the noise has the output error that rounding has there."
    )
    what = "agreement, last step [%]" if logits else "output error, last step [%]"
    return described("Other perturbations", caption, ("perturbation", "place", "norm", "draws", what), rows)


TABLES.register("perturbation")(Part(perturbations, 30))
