"""Displacement of the fixed point."""

from __future__ import annotations

import numpy as np

from loopq.analysis.report.sections import FIGURES, Diagnosis, Part, in_legend_order
from loopq.analysis.report.style import Picture, canvas, label, line, styled, whole_numbers


def displacement(d: Diagnosis) -> Picture | None:
    """Displacement from the final state of full precision (Li, App. L)."""
    results = d["sections"].get("displacement")
    if not results:
        return None
    with styled("displacement"):
        figure, axes = canvas(6.2, 3.2)
        for i, (name, curve) in enumerate(in_legend_order(results["settings"])):
            settled = curve["settled_after"]
            text = name + (f": settles after {settled} updates" if settled else ": still moving")
            line(axes, i, range(1, curve["n_more"] + 1), 100 * np.array(curve["relative"]), text)
        axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
        axes.legend()
        whole_numbers(axes.xaxis)
        label(axes, "further updates from the final state [number]", "displacement / state [%]")
    caption = (
        "The rounded and the full-precision loop both continue from the full-precision final state. A curve that "
        "levels off is a displaced fixed point; one that keeps rising is instability. Settled: within 1 % of the last "
        "value."
    )
    return Picture("displacement", "Displacement of the fixed point", caption, figure)


FIGURES.register("displacement")(Part(displacement, 70))
