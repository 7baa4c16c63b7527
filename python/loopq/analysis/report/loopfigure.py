"""A drawing of the loop: its layers in order, coloured by the damage of rounding each one alone (cf. Li, Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopq.analysis.report.style import (
    ALARM,
    INK,
    MAP,
    SMALL,
    Picture,
    canvas,
    label,
    short_name,
    short_names,
    styled,
)
from loopq.errors import require

_NAMED_COLUMNS = 8


def blocks(layers: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group layers by block: the name up to its first number. A layer without a number forms its own group."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for layer in layers:
        parts = short_name(layer["name"]).split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = ".".join(parts if number is None else parts[: number + 1])
        groups.setdefault(key, []).append(layer)
    return groups


def damage(layer: Mapping[str, Any]) -> float | None:
    """Effect of rounding the layer alone, in percent: predictions changed, or relative error of the output."""
    ablation = layer.get("ablation")
    if not ablation:
        return None
    value = ablation["changed"] if ablation["changed"] is not None else ablation["output_error_last"]
    return None if value is None else 100.0 * float(value)


def draw(diagnosis: Mapping[str, Any]) -> Picture:
    """Draw the loop from `model` and `layers` of a diagnosis."""
    layers = diagnosis["layers"]
    columns = blocks(layers)
    rows = max(len(column) for column in columns.values())
    values = [d for d in map(damage, layers) if d is not None]
    named = len(columns) <= _NAMED_COLUMNS
    width = min(13.0, 2.6 + (1.75 if named else 0.32) * len(columns))
    with styled("loop"):
        figure, axes = canvas(max(width, 6.5), 2.4 + 0.45 * rows)
        colours = _Colours(values)
        for x, (name, column) in enumerate(columns.items()):
            _draw_column(axes, x, name, column, rows, colours, named)
        _draw_paths(axes, list(columns.values()), rows)
        axes.set_xlim(-1.25, len(columns) + 0.25)
        axes.set_ylim(-1.9, rows + 1.3)
        axes.set_xticks(range(len(columns)) if named else [], labels=None)
        axes.set_yticks([])
        axes.grid(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        label(axes, "block within one recurrence step [number]", "layers of the block [one box each]")
        logits = any((layer.get("ablation") or {}).get("changed") is not None for layer in layers)
        if values:
            what = "predictions changed, rounded alone [%]" if logits else "output error, rounded alone [%]"
            figure.colorbar(colours.unit, ax=axes, label=what)
    exposed = [layer for layer in layers if layer["exposed"]]
    caption = (
        f"One recurrence step, applied {diagnosis['model']['n_steps']} times; the state leaves on the right and "
        "returns on the left. The darker a box, the more damage it does when it alone is rounded. "
    )
    if exposed:
        caption += (
            "Hatched boxes with a thick frame have no identity path around them: their error enters the next state in "
            "full. "
        )
    else:
        caption += "Every layer has an identity path around it. "
    if any(damage(layer) is None for layer in layers):
        caption += "White boxes were not measured."
    return Picture("loop", "The loop and where it is exposed", caption.strip(), figure)


class _Colours:
    """Colour of a damage value, and black or white for text on it."""

    def __init__(self, values: Sequence[float]) -> None:
        matplotlib = require("matplotlib")
        top = max(values, default=1.0)
        norm = require("matplotlib.colors").Normalize(0.0, top if top > 0 else 1.0)
        self.unit = require("matplotlib.cm").ScalarMappable(norm, matplotlib.colormaps[MAP])

    def of(self, value: float | None) -> tuple[Any, str]:
        """Face and text colour."""
        if value is None:
            return "white", INK
        face = self.unit.to_rgba(value)
        light = 0.299 * face[0] + 0.587 * face[1] + 0.114 * face[2]
        return face, INK if light > 0.5 else "white"


def _draw_column(
    axes: Any,
    x: int,
    name: str,
    column: Sequence[Mapping[str, Any]],
    rows: int,
    colours: _Colours,
    named: bool,
) -> None:
    patches = require("matplotlib.patches")
    top = (rows + len(column)) / 2
    short = short_names([layer["name"] for layer in column])
    half = 0.42 if named else 0.45
    for i, layer in enumerate(column):
        face, ink = colours.of(damage(layer))
        exposed = bool(layer["exposed"])
        y = top - i - 1
        box = patches.Rectangle(
            (x - half, y + 0.06),
            2 * half,
            0.88,
            facecolor=face,
            edgecolor=ALARM if exposed else "black",
            linewidth=2.6 if exposed else 0.7,
            hatch="///" if exposed else None,
        )
        axes.add_patch(box)
        if named:
            text = short[layer["name"]] if len(column) > 1 else name
            plate = {"facecolor": face, "edgecolor": "none", "pad": 1.0} if exposed else None
            axes.text(x, y + 0.5, text, ha="center", va="center", fontsize=SMALL, color=ink, bbox=plate)
    if named and len(column) > 1:
        # The block's number and the name before it. The rest of the path is the same for all.
        title = ".".join(name.split(".")[-2:])
        axes.text(x, top + 0.12, title, ha="center", va="bottom", fontsize=SMALL, fontweight="bold")


def _draw_paths(axes: Any, columns: Sequence[Sequence[Mapping[str, Any]]], rows: int) -> None:
    """Draw arrows between blocks, identity paths over those with one, and the feedback."""
    arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    middle, last = rows / 2, len(columns) - 1
    axes.annotate("", (-0.47, middle), (-1.0, middle), arrowprops=arrow)
    for x in range(last):
        axes.annotate("", (x + 0.55, middle), (x + 0.43, middle), arrowprops=arrow)
    axes.annotate("", (last + 1.0, middle), (last + 0.47, middle), arrowprops=arrow)
    axes.text(-1.05, middle + 0.12, "$s_t$", ha="center", va="bottom", fontsize=12)
    axes.text(last + 1.05, middle + 0.12, "$s_{t+1}$", ha="center", va="bottom", fontsize=12)
    back = -0.55
    axes.plot(
        [last + 1.0, last + 1.0, -1.0, -1.0], [middle, back, back, middle], color="black", lw=1.3, ls="--"
    )
    axes.annotate("", ((last - 0.2) / 2, back), ((last + 0.2) / 2, back), arrowprops=arrow)
    axes.text(last / 2, back - 0.15, "fed back: the next step starts here", ha="center", va="top")
    for x, column in enumerate(columns):
        if all(layer["exposed"] for layer in column):
            if len(columns) <= _NAMED_COLUMNS:
                axes.text(
                    x, (rows + len(column)) / 2 + 0.12, "no identity path",
                    ha="center", va="bottom", fontweight="bold",
                )  # fmt: skip
            continue
        height = rows + 0.75
        axes.plot([x - 0.48, x - 0.48, x + 0.48, x + 0.48], [middle, height, height, middle],
                  color="#0072B2", lw=1.0, zorder=0)  # fmt: skip
    if any(not layer["exposed"] for column in columns for layer in column):
        axes.plot([], [], color="#0072B2", lw=1.0, label="identity path around the block")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, -0.02))
