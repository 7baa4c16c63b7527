"""The error in the feedback."""

from __future__ import annotations

import numpy as np

from loopq.analysis.report.sections import FIGURES, Diagnosis, Part, in_legend_order
from loopq.analysis.report.style import Picture, label, line, panels, styled


def feedback(d: Diagnosis) -> Picture | None:
    """Final error by the share of the error that is fed back (Li, App. E)."""
    results = d["sections"].get("feedback")
    if not results:
        return None
    settings = results["settings"]
    with styled("feedback"):
        figure, many = panels(len(settings))
        for axes, (setting, curves) in zip(many, in_legend_order(settings), strict=True):
            for i, (columns, curve) in enumerate(in_legend_order(curves)):
                ratio = curve["ratio"]
                text = columns + (f": x{ratio['estimate']:.2f}" if ratio else "")
                returned = curve.get("returned")
                text += "" if returned is None else f", cosine {returned:+.2f}"
                line(axes, i, curve["lambdas"], 100 * np.array(curve["error"]), text)
            axes.set_ylim(bottom=0)
            axes.legend(loc="best")
            label(axes, "share of the error fed back [ratio]", "final error of the state [%]", setting)
    first = next(iter(next(iter(settings.values())).values()))
    what = "All layers are" if results["layers"] == "all" else "The exposed layers are"
    halves = (
        ""
        if results["layers"] == "all"
        else " Their columns are rounded all together, or one input block alone."
    )
    caption = (
        f"{what} rounded, and every step receives only a share of the error so far: 0 cuts the feedback, 1 is the "
        f"ordinary rollout. {first['n_prompts']} prompts, {first['n_seeds']} initial states each; the factor in the "
        "legend is the final error at 1 over that at 0, geometric mean over prompts. The cosine is that of an error "
        f"after one more step with this step's own: positive where they add up, negative where they cancel.{halves}"
    )
    return Picture("feedback", "Error feedback", caption, figure)


FIGURES.register("feedback")(Part(feedback, 50))
