"""Ranks, spectra and proxies of the layers' inputs."""

from __future__ import annotations

import numpy as np

from loopq.analysis.report.sections import FIGURES, Diagnosis, Part, in_legend_order
from loopq.analysis.report.style import (
    INK,
    MAP,
    SMALL,
    Picture,
    canvas,
    label,
    line,
    panels,
    short_names,
    styled,
    whole_numbers,
)


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
        axes.set_yticks(range(len(names)), [short[n] for n in names])
        axes.axvline(len(steps) - 0.5, color="#808080", linewidth=2)
        axes.grid(False)
        if len(steps) <= 17:
            light = {key: table[key] < 55 for key in counts}
            for (i, j), n in counts.items():
                ink = INK if light[i, j] else "white"
                axes.text(j, i, f"{n:,}", ha="center", va="center", fontsize=SMALL, color=ink)
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
        figure, many = panels(len(names))
        for axes, name in zip(many, names, strict=True):
            layer = ranks["layers"][name]
            for i, (key, text) in enumerate(
                (("first", "step 0"), ("last", "last step"), ("all", "sum of all steps"))
            ):
                curve = layer["spectra"][key]
                top = max(curve["value"][0], 1e-300)
                value = np.maximum(np.array(curve["value"]) / top, 1e-12)
                line(axes, i, curve["index"], value, text, markevery=0.2)
            axes.axhline(ranks["threshold"], color="#666666", linewidth=1, linestyle=":")
            axes.annotate(f"{ranks['threshold']:g}", (1, ranks["threshold"]), va="bottom")
            axes.set_xscale("log")
            axes.set_yscale("log")
            label(axes, "index of the eigenvalue [number]", "eigenvalue / largest [ratio]", short[name])
        many[0].legend(loc="lower left")
    caption = (
        "Eigenvalues of the input Hessian, largest first, each curve relative to its largest. The dotted line is the "
        "threshold of the rank. Shown are the layer with the lowest rank over width at step 0, the one whose rank "
        "gains most from later steps, and the first feedback-exposed one."
    )
    return Picture("spectra", "Eigenvalue spectra", caption, figure)


def proxies(d: Diagnosis) -> Picture | None:
    """Per-step reconstruction proxy (Li, App. J)."""
    ranks = d["sections"].get("ranks")
    if not ranks or len(ranks["proxy_sum"]["grouped"]["per_step"]) < 2:
        return None
    with styled("proxy"):
        figure, axes = canvas(6.2, 3.2)
        for i, (name, proxy) in enumerate(in_legend_order(ranks["proxy_sum"])):
            values = np.array(proxy["per_step"])
            spread = proxy["max_over_min"]
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


FIGURES.register("ranks")(Part(rank_map, 20))
FIGURES.register("spectra")(Part(spectra, 30))
FIGURES.register("proxy")(Part(proxies, 110))
