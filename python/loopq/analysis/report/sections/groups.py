"""Group sizes."""

from __future__ import annotations

from loopq.analysis.report.sections import FIGURES, Diagnosis, Part
from loopq.analysis.report.style import Picture, canvas, label, line, styled


def group_sizes(d: Diagnosis) -> Picture | None:
    """Group-size sweep (Li, Table 17)."""
    results = d["sections"].get("groups")
    if not results:
        return None
    rows = results["rows"]
    logits = rows[0]["agreement"] is not None
    steps = rows[0]["steps"]
    picks = sorted({0, len(steps) // 4, len(steps) - 1})
    with styled("groups"):
        figure, axes = canvas(6.2, 3.2)
        for i, pick in enumerate(picks):
            key = "agreement" if logits else "output_error"
            line(axes, i, range(len(rows)), [100 * r[key][pick] for r in rows], f"after step {steps[pick]}")
        axes.set_xticks(
            range(len(rows)), ["row" if r["group_size"] == -1 else str(r["group_size"]) for r in rows]
        )
        axes.legend()
        if logits:
            axes.set_ylim(top=102)
        label(
            axes,
            "input columns that share a scale [number]",
            "same top-1 prediction [% of positions]" if logits else "output error [%]",
        )
    return Picture(
        "groups",
        "Group sizes",
        "The whole loop rounded at several group sizes, compared from the same initial states.",
        figure,
    )


FIGURES.register("groups")(Part(group_sizes, 100))
