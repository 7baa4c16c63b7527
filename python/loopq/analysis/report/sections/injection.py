"""Origin of the error: parts of the loop rounded separately."""

from __future__ import annotations

import numpy as np

from loopq.analysis.report.markup import Cell, described, number, percent_cell
from loopq.analysis.report.sections import FIGURES, TABLES, Diagnosis, Part
from loopq.analysis.report.style import Picture, label, line, panels, styled, whole_numbers

VARIANT_NAMES = {
    "none": "none",
    "exposed": "exposed layers",
    "core": "all other layers",
    "all": "all layers",
    "gaussian": "exposed layers: Gaussian noise of equal norm",
}
_STEP = "recurrence steps done [number]"


def rollout_error(d: Diagnosis) -> Picture | None:
    """State error and agreement along the rollout for each variant of the injection (Li, Fig. 1a)."""
    results = d["sections"].get("injection")
    if not results:
        return None
    paired = results["per channel"]["paired"]
    if len(next(iter(paired.values()))["steps"]) < 2:
        return None
    logits = next(iter(paired.values()))["agreement"] is not None
    with styled("rollout"):
        figure, many = panels(2 if logits else 1, 5.6, 3.6)
        left, *right = many
        for i, (name, run) in enumerate((n, paired[n]) for n in VARIANT_NAMES if n in paired and n != "none"):
            error = run["state_error"] or run["output_error"]
            line(left, i, range(1, len(error) + 1), 100 * np.array(error), VARIANT_NAMES[name])
            for axes in right:
                line(axes, i, run["steps"], 100 * np.array(run["agreement"]), VARIANT_NAMES[name])
        label(left, _STEP, "relative error of the state [%]")
        left.set_ylim(bottom=0)
        left.legend()
        for axes in right:
            label(axes, _STEP, "same top-1 prediction [% of positions]")
            axes.set_ylim(0, 102)
        for axes in many:
            whole_numbers(axes.xaxis)
    settings = results["per channel"]["settings"]
    caption = (
        f"INT{settings['bits']} per channel in parts of the loop, compared with full precision from the same initial "
        "state. Means over prompts. An error that grows from step to step is fed back."
    )
    return Picture("rollout", "Error along the rollout", caption, figure)


def injection(d: Diagnosis) -> str:
    results = d["sections"].get("injection")
    if not results or d["model"]["output"] == "hidden":
        return ""
    rows: list[list[Cell | str]] = []
    for setting, runs in sorted(results.items(), reverse=True):
        for pairing in ("paired", "unpaired"):
            for variant, name in VARIANT_NAMES.items():
                run = (runs[pairing] or {}).get(variant)
                if run:
                    ends = [percent_cell(run["agreement"][0]), percent_cell(run["agreement"][-1])]
                    low, high = (percent_cell(run["final_agreement"][end]).html for end in ("low", "high"))
                    between = Cell(f"{low} to {high}", "number")
                    rows.append([setting, pairing, name, *ends, between, number(run["kl"][-1], ".4f")])
    caption = (
        "Top-1 agreement with full precision, mean over prompts. Paired: both runs start from the same initial state. "
        "The interval, a 95 % bootstrap over prompts, and the KL are those of the last step."
    )
    heads = (
        "rounding",
        "initial states",
        "rounded layers",
        "first step [%]",
        "last step [%]",
        "interval [%]",
        "KL [nat]",
    )
    return described("Where the error enters", caption, heads, rows)


FIGURES.register("rollout")(Part(rollout_error, 40))
TABLES.register("injection")(Part(injection, 20))
