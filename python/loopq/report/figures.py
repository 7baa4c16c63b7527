"""The figures of the page, each drawn from one section of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from loopq.lazy import require
from loopq.report import loopfigure
from loopq.report.style import (
    ALARM,
    INK,
    MAP,
    Picture,
    canvas,
    label,
    line,
    short_names,
    styled,
    whole_numbers,
)

Diagnosis = Mapping[str, Any]
VARIANT_NAMES = {
    "none": "none",
    "exposed": "exposed layers",
    "core": "all other layers",
    "all": "all layers",
    "gaussian": "exposed layers: Gaussian noise of equal norm",
}
_STEP = "recurrence steps done [number]"


def _ordered(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Entries in the order of the legend, whatever their order in the file."""
    first = ("per channel", "all columns")
    return sorted(table.items(), key=lambda item: (item[0] not in first, item[0]))


def loop(d: Diagnosis) -> Picture:
    """Drawing of the loop."""
    return loopfigure.draw(d)


def rank_map(d: Diagnosis) -> Picture | None:
    """Heat map of the rank of each layer's input at each step (Li, Table 19)."""
    ranks = d["sections"].get("ranks")
    if not ranks:
        return None
    layers = ranks["layers"]
    names = list(layers)
    steps = sorted({s["step"] for layer in layers.values() for s in layer["per_step"]})
    table = np.full((len(names), len(steps) + 1), np.nan)
    counts: dict[tuple[int, int], int] = {}
    for i, name in enumerate(names):
        layer = layers[name]
        for s in layer["per_step"]:
            j = steps.index(s["step"])
            table[i, j], counts[i, j] = 100 * s["rank"] / layer["dim"], s["rank"]
        table[i, -1], counts[i, len(steps)] = 100 * layer["all"]["rank"] / layer["dim"], layer["all"]["rank"]
    short = short_names(names)
    with styled("ranks"):
        figure, axes = canvas(min(13.0, 4.5 + 0.5 * len(steps)), max(3.4, 1.5 + 0.3 * len(names)))
        image = axes.imshow(table, aspect="auto", cmap=MAP, vmin=0, vmax=100)
        axes.set_xticks(range(len(steps) + 1), [*map(str, steps), "sum"])
        axes.set_yticks(range(len(names)), [short[n] for n in names], fontsize=8)
        axes.axvline(len(steps) - 0.5, color="#808080", linewidth=2)
        axes.grid(False)
        if len(steps) <= 17:
            light = {key: table[key] < 55 for key in counts}
            for (i, j), n in counts.items():
                ink = INK if light[i, j] else "white"
                axes.text(j, i, f"{n:,}", ha="center", va="center", fontsize=7, color=ink)
        label(axes, "recurrence step [index]", "input of layer [name]")
        figure.colorbar(image, ax=axes, label="directions above the threshold [% of the width]")
    caption = (
        f"Eigenvalues of each layer's input Hessian above {ranks['threshold']:g} of the largest, at each step over "
        "the same token positions, and of the sum over all steps (last column); the numbers are counts. A pale first "
        "column beside darker ones is calibration blindness. Layers that read the same input share a row."
    )
    return Picture("ranks", "Rank of each layer's input at each step", caption, figure)


def spectra(d: Diagnosis) -> Picture | None:
    """Eigenvalues of the Hessian at step 0, at the last step and summed (Li, Fig. 5)."""
    ranks = d["sections"].get("ranks")
    if not ranks:
        return None
    names = ranks["drawn"]
    short = short_names(ranks["layers"])
    with styled("spectra"):
        figure, many = canvas(4.2 * len(names) + 0.5, 3.4, len(names))
        for axes, name in zip(np.atleast_1d(many), names, strict=True):
            layer = ranks["layers"][name]
            for i, (key, text) in enumerate(
                (("first", "step 0"), ("last", "last step"), ("all", "sum of all steps"))
            ):
                curve = layer["spectra"][key]
                top = max(curve["value"][0], 1e-300)
                value = np.maximum(np.array(curve["value"]) / top, 1e-12)
                line(axes, i, curve["index"], value, text, markevery=0.2)
            axes.axhline(ranks["threshold"], color="#666666", linewidth=1, linestyle=":")
            axes.annotate(f"{ranks['threshold']:g}", (1, ranks["threshold"]), fontsize=8, va="bottom")
            axes.set_xscale("log")
            axes.set_yscale("log")
            label(axes, "index of the eigenvalue [number]", "eigenvalue / largest [ratio]", short[name])
        np.atleast_1d(many)[0].legend(loc="lower left")
    caption = (
        "Eigenvalues of the input Hessian, largest first, each curve relative to its largest. The dotted line is the "
        "threshold of the rank. Shown are the layer with the lowest rank over width at step 0, the one whose rank "
        "gains most from later steps, and the first feedback-exposed one."
    )
    return Picture("spectra", "Eigenvalue spectra", caption, figure)


def rollout_error(d: Diagnosis) -> Picture | None:
    """State error and agreement along the rollout for each variant of the injection (Li, Fig. 1a)."""
    found = d["sections"].get("injection")
    if not found:
        return None
    paired = found["per channel"]["paired"]
    if len(next(iter(paired.values()))["steps"]) < 2:
        return None
    logits = next(iter(paired.values()))["agreement"] is not None
    with styled("rollout"):
        figure, many = canvas(10.5 if logits else 6.0, 3.6, 2 if logits else 1)
        left, *right = np.atleast_1d(many)
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
        for axes in np.atleast_1d(many):
            whole_numbers(axes.xaxis)
    settings = found["per channel"]["settings"]
    caption = (
        f"INT{settings['bits']} per channel in parts of the loop, compared with full precision from the same initial "
        "state. Means over prompts. An error that grows from step to step is fed back."
    )
    return Picture("rollout", "Error along the rollout", caption, figure)


def feedback(d: Diagnosis) -> Picture | None:
    """Final error by the share of the error that is fed back (Li, App. E)."""
    found = d["sections"].get("feedback")
    if not found:
        return None
    settings = found["settings"]
    with styled("feedback"):
        figure, many = canvas(4.6 * len(settings) + 0.6, 3.5, len(settings))
        for axes, (setting, curves) in zip(np.atleast_1d(many), _ordered(settings), strict=True):
            for i, (columns, curve) in enumerate(_ordered(curves)):
                ratio = curve["ratio"]
                text = columns + (f": x{ratio['estimate']:.2f}" if ratio else "")
                line(axes, i, curve["lambdas"], 100 * np.array(curve["error"]), text)
            axes.set_ylim(bottom=0)
            axes.legend(loc="best")
            label(axes, "share of the error fed back [ratio]", "final error of the state [%]", setting)
    first = next(iter(next(iter(settings.values())).values()))
    what = "All layers are" if found["layers"] == "all" else "The exposed layers are"
    halves = (
        ""
        if found["layers"] == "all"
        else " Their columns are rounded all together, or one input block alone."
    )
    caption = (
        f"{what} rounded, and every step receives only a share of the error so far: 0 cuts the feedback, 1 is the "
        f"ordinary rollout. {first['n_prompts']} prompts, {first['n_seeds']} initial states each; the factor in the "
        f"legend is the final error at 1 over that at 0, geometric mean over prompts.{halves}"
    )
    return Picture("feedback", "Error feedback", caption, figure)


def ablations(d: Diagnosis) -> Picture | None:
    """Damage of each layer rounded alone, with its rank by two one-step measures (Li, Table 16)."""
    found = d["sections"].get("ablation")
    if not found:
        return None
    layers = {layer["name"]: layer for layer in d["layers"] if layer["ablation"]}
    order = sorted(layers, key=lambda name: -layers[name]["ablation"]["place"])[-40:]
    places = found["table"]["places"]
    logits = found["measure"] == "changed"
    short = short_names(layers)
    with styled("ablation"):
        figure, axes = canvas(6.2, 1.2 + 0.24 * len(order))
        values = [loopfigure.damage(layers[name]) or 0.0 for name in order]
        bars = axes.barh(range(len(order)), values, color="#56B4E9", edgecolor="#333333", linewidth=0.5)
        for bar, name in zip(bars, order, strict=True):
            if layers[name]["exposed"]:
                bar.set(hatch="///", edgecolor=ALARM, linewidth=1.6)
        rows = [layers[name]["ablation"]["per_channel"] for name in order]
        key = "changed" if logits else "output_error_last"
        whole = [100 * float(row[key] or 0.0) for row in rows]
        axes.plot(whole, range(len(order)), "D", color="black", markersize=4, label="one scale per row")
        # Above the axes: inside, it hides the text of a bar.
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0.0)
        for i, name in enumerate(order):
            place = places[name]
            text = f"gain {place['random-direction gain'] or '-'}, trace {place['Hessian trace'] or '-'}"
            axes.annotate(
                text,
                (max(values[i], whole[i]), i),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
        axes.set_yticks(range(len(order)), [short[n] for n in order], fontsize=8)
        axes.margins(x=0.25)
        axes.grid(axis="y", visible=False)
        what = "predictions changed [%]" if logits else "output error [%]"
        label(axes, f"{what}, this layer alone rounded", "layer [name]")
    rho = found["table"]["spearman"]
    setting = next(iter(layers.values()))["ablation"]["setting"]
    caption = (
        f"Each layer rounded alone to {setting}, {found['n_prompts']} prompts, mean over all steps; diamonds: one "
        "scale per row. Beside each bar is the layer's rank by random-direction gain and by Hessian trace (1: most "
        f"sensitive); their Spearman correlations with the ablation are {_number(rho['random-direction gain'])} and "
        f"{_number(rho['Hessian trace'])}. Hatched: feedback-exposed."
    )
    return Picture("ablation", "Damage of rounding each layer alone", caption, figure)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}"


def proxies(d: Diagnosis) -> Picture | None:
    """Per-step reconstruction proxy (Li, App. J)."""
    ranks = d["sections"].get("ranks")
    if not ranks or len(ranks["proxy_sum"]["grouped"]["per_step"]) < 2:
        return None
    with styled("proxy"):
        figure, axes = canvas(6.2, 3.2)
        for i, (name, found) in enumerate(_ordered(ranks["proxy_sum"])):
            values = np.array(found["per_step"])
            spread = found["max_over_min"]
            text = name + (f" (max / min {spread:.2f})" if spread else "")
            line(axes, i, range(len(values)), 100 * values / values.sum(), text)
        uniform = 100 * ranks["proxy_sum"]["grouped"]["uniform_share"]
        axes.axhline(uniform, color="#666666", linewidth=1, linestyle=":")
        axes.set_ylim(0, 1.4 * max(uniform, axes.get_ylim()[1]))
        axes.legend()
        whole_numbers(axes.xaxis)
        label(axes, "recurrence step [index]", "share of the reconstruction loss [%]")
    caption = (
        "tr(dW H_t dW^T) of rounding to nearest at each step, summed over the layers; the dotted line is an equal "
        "share. A flat line means that the steps differ in the directions of their inputs, not in the error's size."
    )
    return Picture("proxy", "Reconstruction loss along the rollout", caption, figure)


def displacement(d: Diagnosis) -> Picture | None:
    """Displacement from the final state of full precision (Li, App. L)."""
    found = d["sections"].get("displacement")
    if not found:
        return None
    with styled("displacement"):
        figure, axes = canvas(6.2, 3.2)
        for i, (name, curve) in enumerate(_ordered(found["settings"])):
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


def jacobian(d: Diagnosis) -> Picture | None:
    """Spectral radius of the step for every prompt (Li, App. K)."""
    found = d["sections"].get("jacobian")
    if not found:
        return None
    entries = [e for e in found["prompts"] if e["state"] == "plain"]
    kinds = ("reference", "changed", "reference, bypass", "changed, bypass")
    names = [n for n in kinds if n in entries[0]["maps"]]
    with styled("jacobian"):
        figure, axes = canvas(6.2, 3.4)
        for i, name in enumerate(names):
            accepted = [e["maps"][name] for e in entries if e["maps"][name]["accepted"]]
            jitter = (np.arange(len(accepted)) + 1) / (len(accepted) + 1) - 0.5
            axes.plot(i + 0.5 * jitter, [m["radius"] for m in accepted], "o", color="#0072B2", alpha=0.8)
        axes.axhline(1.0, color=ALARM, linestyle="--", linewidth=1.2)
        axes.annotate("above 1 a direction grows", (-0.4, 1.0), fontsize=8, va="bottom")
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(0, 1.1 * max(1.0, axes.get_ylim()[1]))
        axes.set_xticks(range(len(names)), [n.replace("changed", "rounded") for n in names])
        label(axes, "map of one step [kind]", "spectral radius [factor per step]")
    a = found["acceptance"]
    caption = (
        "Largest eigenvalue magnitude of the last step's Jacobian at the full-precision final state; each dot is a "
        "prompt. "
        f"{a['n_accepted']} of {a['n_maps']} estimates meet the acceptance rules; the largest relative residual is "
        f"{a['largest_residual']:.1e}, the largest disagreement of two start vectors {a['largest_disagreement']:.1e}."
    )
    return Picture("jacobian", "Stability of the step", caption, figure)


def bypass(d: Diagnosis) -> Picture | None:
    """Response to the weight error with and without the identity path (Li, App. K)."""
    found = d["sections"].get("bypass")
    if not found:
        return None
    rows = [r for r in found["rows"] if r["state"] == "plain"]
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
                fontsize=9,
            )
        axes.set_xticks(place, [f"{r['radius']:g}" for r in rows])
        axes.margins(y=0.4)
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper right", ncols=2)
        label(axes, "size of the perturbation / state [ratio]", "mismatch / response [ratio]")
    p = max(r["p_holm"] for r in rows)
    caption = (
        f"Difference between the responses of the rounded and the full-precision step to the same "
        f"{found['settings']['n_directions']} small perturbations, with and without an identity path added around the "
        f"exposed layer. Percentages: change due to the path; largest Holm-adjusted sign-flip p {p:.2g} over "
        f"{rows[0]['n_prompts']} prompts. The model was not trained with the path, so this describes the local "
        "structure only."
    )
    return Picture("bypass", "Effect of an identity path", caption, figure)


def group_sizes(d: Diagnosis) -> Picture | None:
    """Group-size sweep (Li, Table 17)."""
    found = d["sections"].get("groups")
    if not found:
        return None
    rows = found["rows"]
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


def gain_scatter(points: Sequence[Mapping[str, Any]]) -> Picture:
    """Gap closed by trajectory calibration against the largest rank gain, a point for each model (Li, Fig. 2).

    Parameters
    ----------
    points : sequence of mapping
        `name`, `gain`, `gap_closed` (a share), `one_step_better` (one-step GPTQ is better than round-to-nearest).
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
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set_xscale("log")
        axes.legend(loc="best")
        label(axes, "largest rank gain, sum of steps over step 0 [ratio]", "gap to full precision closed [%]")
    caption = (
        "Each point is a model. A high rank gain says that later steps matter, not how much is recovered."
    )
    return Picture("scatter", "Rank gain and gap closed", caption, figure)


FIGURES: tuple[Callable[[Diagnosis], Picture | None], ...] = (
    loop,
    rank_map,
    spectra,
    rollout_error,
    feedback,
    ablations,
    displacement,
    jacobian,
    bypass,
    group_sizes,
    proxies,
)


def all_figures(d: Diagnosis) -> list[Picture]:
    """Every figure that the diagnosis has data for."""
    require("matplotlib")
    return [picture for make in FIGURES if (picture := make(d)) is not None]
