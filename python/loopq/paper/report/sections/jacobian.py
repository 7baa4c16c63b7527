"""Stability of the step."""

from __future__ import annotations

import numpy as np

from loopq.analysis.report.sections import FIGURES, Diagnosis, Part
from loopq.analysis.report.style import ALARM, Picture, canvas, label, styled


def jacobian(d: Diagnosis) -> Picture | None:
    """Spectral radius of the step for every prompt (Li, App. K)."""
    results = d["sections"].get("jacobian")
    if not results:
        return None
    entries = [e for e in results["prompts"] if e["state"] == "plain"]
    kinds = ("reference", "changed", "reference, bypass", "changed, bypass")
    names = [n for n in kinds if n in entries[0]["maps"]]
    with styled("jacobian"):
        figure, axes = canvas(6.2, 3.4)
        for i, name in enumerate(names):
            accepted = [e["maps"][name] for e in entries if e["maps"][name]["accepted"]]
            jitter = (np.arange(len(accepted)) + 1) / (len(accepted) + 1) - 0.5
            axes.plot(i + 0.5 * jitter, [m["radius"] for m in accepted], "o", color="#0072B2", alpha=0.8)
        axes.axhline(1.0, color=ALARM, linestyle="--", linewidth=1.2)
        axes.annotate("above 1 a direction grows", (-0.4, 1.0), va="bottom")
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(0, 1.1 * max(1.0, axes.get_ylim()[1]))
        axes.set_xticks(range(len(names)), [n.replace("changed", "rounded") for n in names])
        label(axes, "map of one step [kind]", "spectral radius [factor per step]")
    a = results["acceptance"]
    caption = (
        "Largest eigenvalue magnitude of the last step's Jacobian at the full-precision final state; each dot is a "
        "prompt. "
        f"{a['n_accepted']} of {a['n_maps']} estimates meet the acceptance rules; the largest relative residual is "
        f"{a['largest_residual']:.1e}, the largest disagreement of two start vectors {a['largest_disagreement']:.1e}."
    )
    return Picture("jacobian", "Stability of the step", caption, figure)


FIGURES.register("jacobian")(Part(jacobian, 80))
