"""Li, Table 17: agreement along the rollout by group size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopq.analysis.diagnosis.sections.groups import groups
from loopq.analysis.diagnosis.weights import quantizable
from loopq.paper.bench import Bench
from loopq.paper.compared import closer, curves, without_logits
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Group size of rounding"


def measure(bench: Bench) -> Object:
    """Round the whole loop at each group size and compare at every step."""
    tokens = bench.model.evaluation
    width = min(p.in_features for p in quantizable(bench.system.shared_parameters(bench.depth)))
    return bench.head() | {"width": width} | groups(bench.context(n_prompts=len(tokens.sequences)))


def _name(size: int) -> str:
    return "per channel" if size == -1 else f"g = {size}"


def show(results: Sequence[Found]) -> Shown:
    """Agreement after the first, a middle and the last step."""
    rows, claims, panels = [], [], []
    for result in results:
        sizes = result["rows"]
        for r in sizes:
            a = r["agreement"]
            chosen = dict.fromkeys((0, len(a) // 4, len(a) - 1))
            cells: list[str | None] = [f"{100 * a[i]:.1f} % (N = {r['steps'][i]})" for i in chosen]
            cells += [None] * (3 - len(cells))
            rows.append((result["model"], _name(r["group_size"]), *cells, f"{r['kl'][-1]:.3g}"))
        series = {_name(r["group_size"]): (r["steps"], [100 * v for v in r["agreement"]]) for r in sizes}
        panels.append((result["model"], series))
        # A group as wide as the narrowest input is a row there.
        grouped = [r for r in sizes if 0 < r["group_size"] < result["width"]]
        if grouped:
            worst, row = max(grouped, key=lambda r: float(r["kl"][-1])), sizes[-1]
            text = f"the worst group size, {worst['group_size']}, is closer than one scale per row"
            claims.append(closer(result["model"], text, worst["last"]["kl"], row["last"]["kl"], "group size"))
    text = "Top-1 agreement with full precision, the whole loop rounded; initial states are paired."
    header = ("model", "group size", "early", "later", "last", "KL, last")

    def pictures() -> list[Any]:
        at = ("recurrence steps done [number]", "same top-1 prediction [%]")
        return [curves(panels, "group-size", TITLE, text, at)]

    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims, pictures)


TABLES.register("group-size")(
    PaperTable(
        ("Table 17",),
        TITLE,
        "Huginn after 32 steps: 88.4, 87.5, 86.5, 83.9 % for groups of 32 to 256, 7.6 % with one scale per row.",
        measure,
        show,
        without_logits,
    )
)
