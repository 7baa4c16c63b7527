"""Effect of an identity path."""

from __future__ import annotations

import numpy as np

from loopq.analysis.report.sections import FIGURES, Diagnosis, Part
from loopq.analysis.report.style import Picture, canvas, label, styled


def bypass(d: Diagnosis) -> Picture | None:
    """Response to the weight error with and without the identity path (Li, App. K)."""
    result = d["sections"].get("bypass")
    if not result:
        return None
    rows = [r for r in result["rows"] if r["state"] == "plain"]
    with styled("bypass"):
        figure, axes = canvas(6.2, 3.2)
        place = np.arange(len(rows))
        axes.bar(place - 0.2, [r["D0"] for r in rows], 0.38, color="#D55E00", hatch="///", edgecolor="black",
                 label="without identity path")  # fmt: skip
        axes.bar(place + 0.2, [r["D1"] for r in rows], 0.38, color="#56B4E9", edgecolor="black",
                 label="with identity path")  # fmt: skip
        for i, r in enumerate(rows):
            axes.text(
                i,
                max(r["D0"], r["D1"]),
                f"{-100 * r['attenuation']:+.0f} %",
                ha="center",
                va="bottom",
            )
        axes.set_xticks(place, [f"{r['radius']:g}" for r in rows])
        axes.margins(y=0.4)
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper right", ncols=2)
        label(axes, "size of the perturbation / state [ratio]", "mismatch / response [ratio]")
    p = max(r["p_holm"] for r in rows)
    caption = (
        f"Difference between the responses of the rounded and the full-precision step to the same "
        f"{result['settings']['n_directions']} small perturbations, with and without an identity path added around the "
        f"exposed layer. Percentages: change due to the path; largest Holm-adjusted sign-flip p {p:.2g} over "
        f"{rows[0]['n_prompts']} prompts. The model was not trained with the path, so this describes the local "
        "structure only."
    )
    return Picture("bypass", "Effect of an identity path", caption, figure)


FIGURES.register("bypass")(Part(bypass, 90))
