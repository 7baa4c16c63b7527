"""The figure of gap closed against rank gain, used by two of the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopq.analysis.report.style import Picture, canvas, label, styled


def gain_scatter(points: Sequence[Mapping[str, Any]]) -> Picture:
    """Gap closed by trajectory calibration against the largest rank gain, one point per model (Li, Fig. 2).

    Parameters
    ----------
    points : sequence of mapping
        `name`, `gain` and `gap_closed` (a share). `one_step_better` marks models where one-step GPTQ beats rounding.
    """
    with styled("scatter"):
        figure, axes = canvas(6.2, 3.8)
        for better, marker, colour in ((True, "o", "#0072B2"), (False, "s", "#D55E00")):
            chosen = [p for p in points if bool(p["one_step_better"]) == better]
            text = "one-step GPTQ is " + ("better" if better else "worse") + " than rounding"
            axes.plot([p["gain"] for p in chosen], [100 * p["gap_closed"] for p in chosen], marker, ls="", color=colour,
                      label=text, markersize=7)  # fmt: skip
        for p in points:
            axes.annotate(p["name"], (p["gain"], 100 * p["gap_closed"]), xytext=(6, 3),
                          textcoords="offset points")  # fmt: skip
        axes.set_xscale("log")
        for which in ("major", "minor"):
            getattr(axes.xaxis, f"set_{which}_formatter")("{x:g}")
        axes.legend(loc="best")
        label(axes, "largest rank gain, sum of steps over step 0 [ratio]", "gap to full precision closed [%]")
    caption = (
        "Each point is a model. A high rank gain says that later steps matter, not how much is recovered."
    )
    return Picture("scatter", "Rank gain and gap closed", caption, figure)
