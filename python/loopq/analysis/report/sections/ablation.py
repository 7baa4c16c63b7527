"""Each layer rounded alone."""

from __future__ import annotations

from loopq.analysis.report import loopfigure
from loopq.analysis.report.sections import FIGURES, Diagnosis, Part
from loopq.analysis.report.style import ALARM, Picture, canvas, label, short_names, styled


def ablations(d: Diagnosis) -> Picture | None:
    """Damage of each layer rounded alone, with its rank by two one-step measures (Li, Table 16)."""
    results = d["sections"].get("ablation")
    if not results:
        return None
    layers = {layer["name"]: layer for layer in d["layers"] if layer["ablation"]}
    order = sorted(layers, key=lambda name: -layers[name]["ablation"]["place"])[-40:]
    places = results["table"]["places"]
    logits = results["measure"] == "changed"
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
        # Above the axes, because inside it would hide the text of a bar.
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0.0)
        for i, name in enumerate(order):
            place = places[name]
            text = f"gain {place['random-direction gain'] or '-'}, trace {place['Hessian trace'] or '-'}"
            axes.annotate(
                text, (max(values[i], whole[i]), i), xytext=(7, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(order)), [short[n] for n in order])
        axes.margins(x=0.25)
        axes.grid(axis="y", visible=False)
        what = "predictions changed [%]" if logits else "output error [%]"
        label(axes, f"{what}, this layer alone rounded", "layer [name]")
    rho = results["table"]["spearman"]
    setting = next(iter(layers.values()))["ablation"]["setting"]
    caption = (
        f"Each layer rounded alone to {setting}, {results['n_prompts']} prompts, mean over all steps; diamonds: one "
        "scale per row. Beside each bar is the layer's rank by random-direction gain and by Hessian trace (1: most "
        f"sensitive); their Spearman correlations with the ablation are {_number(rho['random-direction gain'])} and "
        f"{_number(rho['Hessian trace'])}. Hatched: feedback-exposed."
    )
    return Picture("ablation", "Damage of rounding each layer alone", caption, figure)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}"


FIGURES.register("ablation")(Part(ablations, 60))
