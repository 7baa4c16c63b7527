"""Pictures of README and docs, drawn from records alone: `python -m benches.quality.picture [--out FOLDER]`.

claim-light.svg and claim-dark.svg: KL of SmolLM2's loop against bits a weight, a line for each tool and setting, from
the newest smollm2-peers-DATE.json. The line of EXL3, which has no groups, is drawn on to the bits of the others.

picture-light.svg and picture-dark.svg. Left, calibration blindness: the KL of each model solved from one step and
from all steps, over the KL of rounding. From the newest peers-DATE.json where it has these for most of the models
of the newest main-table-DATE.json, else from that. Right: KL against bits per weight, for loopq and other tools,
from the newest peers-DATE.json. It shows the geometric mean over the models that loopq and llm-compressor have at
all bits. A tool without all of them is left out and named in what the command prints.

types-light.svg and types-dark.svg: types of GGUF and FP4 by loopq and by the engines' tools, KL against bits, from the
newest gguf-DATE.json.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator, StrMethodFormatter

from benches.pages import RECORD, ROOT
from benches.quality.peers_table import EVEN, NOT_EQUAL, SMALL, Rows, means
from benches.quality.real import EXL3, SMOLLM2, exl3_at, stored_bits

#: Ratio of KL to that of rounding for each model: one step, all steps, and loopq's default if known.
Ratios = dict[str, dict[str, float]]
STEPS = {
    "one step": "GPTQ, one step, paper",
    "all steps": "GPTQ, trajectory, paper",
    "loopq": "loopq default",
}
BLIND_GRID = (4, 128)
BITS, GROUP = (2, 3, 4), 32
#: Record's name, name in the picture, hue and marker.
CURVES = (
    ("HQQ", "HQQ", "pink", "v"),
    ("GPTQModel", "GPTQModel", "yellow", "P"),
    ("auto-round", "auto-round", "sky", "X"),
    ("llm-compressor", "llm-compressor", "orange", "s"),
    ("llm-compressor, mse", "llm-compressor, mse", "green", "^"),
    ("loopq default", "loopq", "blue", "o"),
    ("loopq best", "loopq, best", "ink", "D"),
    ("loopq best, trellis", "loopq, trellis", "violet", "*"),
)
#: Lines of the real model: the record's name, the name in the picture, hue and marker.
LINES = (
    ("llm-compressor", "llm-compressor", "orange", "s"),
    ("llm-compressor, mse", "llm-compressor, mse", "green", "^"),
    ("llm-compressor, imatrix_mse", "llm-compressor, imatrix_mse", "pink", "v"),
    ("auto-round", "auto-round", "sky", "X"),
    ("auto-round, best", "auto-round, best", "sky", "P"),
    (EXL3, "EXL3", "yellow", "o"),
    ("loopq fast", "loopq, fast", "violet", "D"),
    (EVEN, "loopq, even levels", "violet", "o"),
    ("loopq default", "loopq", "blue", "o"),
    (SMALL, "loopq, small", "ink", "*"),
)
NEEDED = ("loopq default", "llm-compressor")


@dataclass(frozen=True)
class Theme:
    """Colours of one page colour: Okabe and Ito's hues, lighter ones on dark."""

    name: str
    page: str
    ink: str
    soft: str
    hues: Mapping[str, str]

    def colour(self, hue: str) -> str:
        """The colour of a hue's name."""
        return self.ink if hue == "ink" else self.hues[hue]


LIGHT = Theme(
    "light", "#ffffff", "#1f2328", "#59636e",
    {"blue": "#0072B2", "orange": "#C44E00", "green": "#007F5F",
     "pink": "#A8487E", "yellow": "#8A6A00", "sky": "#3A8FBF", "violet": "#6B4FBB"},
)  # fmt: skip
DARK = Theme(
    "dark", "#0d1117", "#e6edf3", "#9198a1",
    {"blue": "#56B4E9", "orange": "#FF9A57", "green": "#3FC79A",
     "pink": "#E7A0C8", "yellow": "#F0C808", "sky": "#A5D8F3", "violet": "#B9A3FF"},
)  # fmt: skip


def newest(stem: str, folder: Path) -> Path:
    """The newest record of a kind, by the date in its name."""
    dated = re.compile(rf"{stem}-\d{{4}}-\d{{2}}-\d{{2}}\.json")
    records = sorted(p for p in folder.glob(f"{stem}-*.json") if dated.fullmatch(p.name))
    if not records:
        raise SystemExit(f"{folder}: no {stem}-DATE.json")
    return records[-1]


def ratios_of_peers(records: Rows) -> Ratios:
    """Ratios by model out of a comparison with other tools; models without all of them are left out."""
    kl = means([r for r in records if (r["bits"], r["group"]) == BLIND_GRID])
    ratios = {}
    for model in dict.fromkeys(m for m, _ in kl):
        row = {k: kl.get((model, v), np.nan) / kl.get((model, "RTN"), np.nan) for k, v in STEPS.items()}
        if np.isfinite(list(row.values())).all() and "+" not in model:
            ratios[model] = row
    return ratios


def ratios_of_main(models: Sequence[Mapping[str, Any]]) -> Ratios:
    """Ratios by looped model out of a main table."""
    ratios = {}
    for model in models:
        for grid in model["grids"]:
            if (
                model["looped"]
                and model["output"] == "logits"
                and (grid["bits"], grid["group_size"]) == BLIND_GRID
            ):
                ratios[model["model"]] = {
                    to: grid["ratios"][f"{of} / RTN"]["estimate"]
                    for to, of in (("one step", "one step"), ("all steps", "N steps"))
                }
    return ratios


def first_trainings(rows: Ratios) -> Ratios:
    """One row for a kind of model: further trainings of it are left out."""
    return {m: r for m, r in rows.items() if not re.search(r"_seed\d+$", m)}


def curves(records: Rows) -> tuple[dict[str, list[float]], list[str], list[str]]:
    """Mean KL of each tool at each width, the models of the mean, and tools that lack some of them.

    Of the sets of models with at least so many rows at every width, the one that shows most: models times tools that
    all of them have.
    """
    kl = {b: means([r for r in records if (r["bits"], r["group"]) == (b, GROUP)]) for b in BITS}
    everywhere = [
        model
        for model in dict.fromkeys(m for m, _ in kl[BITS[0]])
        if "+" not in model and all((model, v) in kl[b] for b in BITS for v in NEEDED)
    ]
    has = {m: {v for v, *_ in CURVES if all((m, v) in kl[b] for b in BITS)} for m in everywhere}
    sets = [[m for m in everywhere if len(has[m]) >= n] for n in sorted({len(h) for h in has.values()})]
    everywhere = max(sets, key=lambda s: len(s) * len(set.intersection(*(has[m] for m in s))), default=[])
    drawn, lacking = {}, []
    for variant, *_ in CURVES:
        if everywhere and all((m, variant) in kl[b] for b in BITS for m in everywhere):
            drawn[variant] = [
                float(np.exp(np.mean([np.log(kl[b][m, variant]) for m in everywhere]))) for b in BITS
            ]
        else:
            lacking.append(variant)
    return drawn, everywhere, lacking


def draw_blindness(axes: Any, rows: Ratios, theme: Theme) -> None:
    """A line for each model from its one-step ratio to that of all steps; rounding is 1."""
    order = sorted(rows, key=lambda m: rows[m]["one step"])
    marks = (("one step", "orange", "s"), ("all steps", "green", "^"), ("loopq", "blue", "o"))
    shown = [m for m in marks if m[0] in rows[order[0]]]
    for y, model in enumerate(order):
        values = [rows[model][k] for k, *_ in shown]
        axes.plot([min(values), max(values)], [y, y], color=theme.soft, linewidth=1, alpha=0.6, zorder=1)
        for key, hue, marker in shown:
            axes.plot(rows[model][key], y, marker, color=theme.colour(hue), markersize=6, zorder=2)
    top = order[-1]
    for key, hue, _ in shown:
        axes.annotate(
            key, (rows[top][key], len(order) - 1), xytext=(0, 8), textcoords="offset points",
            ha="center", va="bottom", color=theme.colour(hue), weight="bold", fontsize=9,
        )  # fmt: skip
    axes.axvline(1, color=theme.ink, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.text(1, -0.95, " worse than rounding →", ha="left", va="center", color=theme.ink, fontsize=8.5)
    axes.set_yticks(range(len(order)), [m.replace("_", " ") for m in order])
    axes.set_ylim(-1.4, len(order) + 0.1)
    ratio_axis(axes, rows)
    axes.set_title("Calibration blindness", loc="left")
    axes.grid(axis="x", alpha=0.18)


def ratio_axis(axes: Any, rows: Ratios) -> None:
    """A logarithmic axis with ticks at powers of two."""
    values = [v for row in rows.values() for v in row.values()]
    low, high = min(values) / 1.25, max(*values, 1.0) * 1.9
    ticks = [2.0**k for k in range(-6, 5) if low <= 2.0**k <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FixedFormatter([f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks]))
    bits, group = BLIND_GRID
    axes.set_xlabel(f"KL to full precision / KL of rounding, INT{bits} g{group}")


def draw_curves(axes: Any, drawn: Mapping[str, Sequence[float]], models: Sequence[str], theme: Theme) -> None:
    """One line for each tool, named at its upper end."""
    for variant, _, hue, marker in CURVES:
        if variant in drawn:
            ours = variant.startswith("loopq")
            axes.plot(
                widths(variant), drawn[variant], marker=marker, color=theme.colour(hue), markersize=6,
                linewidth=2.2 if ours else 1.3, zorder=3 if ours else 2,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(0.85, 5.15 if any(v in drawn for v in NOT_EQUAL) else 4.65)
    axes.xaxis.set_major_locator(FixedLocator([2.5, 3.0, 3.5, 4.0, 4.5, 5.0]))
    named = {variant: (name, hue) for variant, name, hue, _ in CURVES}
    place_names(axes, [(widths(v)[0], kl[0], *named[v]) for v, kl in drawn.items()], theme)
    axes.set_xlabel(f"bits a weight, with scales (INT2, 3, 4 in groups of {GROUP})")
    axes.set_ylabel("KL to full precision [nat per token]")
    what = models[0].replace("_", " ") if len(models) == 1 else f"mean of {len(models)} models"
    axes.set_title(f"KL against bits: {what}", loc="left")
    axes.grid(alpha=0.18)


def widths(variant: str) -> list[float]:
    """Bits a weight: codes, a 16-bit scale a group, and HQQ's zero point."""
    return [b + (2 if variant in NOT_EQUAL else 1) * 16 / GROUP for b in BITS]


def place_names(axes: Any, ends: Sequence[tuple[float, float, str, str]], theme: Theme) -> None:
    """Names and hues left of the curves' upper ends, moved apart where they would touch."""
    low, high = axes.get_ylim()
    gap = 0.054 * np.log10(high / low)
    place = np.inf
    for bits, kl, name, hue in sorted(ends, key=lambda end: -end[1]):
        place = min(np.log10(kl), place - gap)
        axes.text(
            bits - 0.1, 10**place, name, ha="right", va="center", color=theme.colour(hue),
            fontsize=9, weight="bold" if name.startswith("loopq") else "normal",
        )  # fmt: skip


def draw_claim(figure: Figure, records: Rows, theme: Theme) -> None:
    """A line for each tool and setting of the real model, from the first draw of prompts."""
    axes, ends = figure.subplots(), []
    first = [r for r in records if r["draw"] == 0 and r["bits"] in (3, 4)]
    for variant, name, hue, marker in LINES:
        here = sorted((r for r in first if r["variant"] == variant), key=stored_bits)
        if not here:
            continue
        ours = name.startswith("loopq")
        axes.plot(
            [stored_bits(r) for r in here], [r["kl"] for r in here], marker=marker, color=theme.colour(hue),
            markersize=6, linewidth=2.2 if ours else 1.3, zorder=3 if ours else 2,
        )  # fmt: skip
        ends.append((stored_bits(here[0]), here[0]["kl"], name, hue))
        if variant == EXL3:
            beyond = [stored_bits(here[-1]), max(map(stored_bits, first))]
            at = [exl3_at(here, bits) for bits in beyond]
            axes.plot(beyond, at, color=theme.colour(hue), linewidth=1.3, linestyle=(0, (3, 3)), zorder=2)
    axes.set_yscale("log")
    axes.set_yticks([k for k in (0.03, 0.1, 0.3, 1.0) if k <= max(kl for _, kl, *_ in ends)])
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(2.7, 4.35)
    axes.xaxis.set_major_locator(FixedLocator([3.0, 3.25, 3.5, 3.75, 4.0, 4.25]))
    place_names(axes, ends, theme)
    axes.set_xlabel("bits a weight, with scales")
    axes.set_ylabel("KL to full precision [nat per token]")
    axes.set_title("SmolLM2-135M with a loop: error by bits, lower is better", loc="left")
    axes.grid(alpha=0.18)


def draw_types(figure: Figure, run: Mapping[str, Any], theme: Theme) -> None:
    """A line for each type, by bits, from the tool's KL to loopq's. Many types have nearly the same bits."""
    axes = figure.subplots()
    tools, ours = theme.colour("orange"), theme.colour("blue")
    both = {kind: row for kind, row in run["rows"].items() if "loopq" in row}
    rows = sorted(both.items(), key=lambda item: (item[1]["bits"], -item[1]["loopq"]))
    for y, (kind, row) in enumerate(rows):
        tool, kl = row["tool, importance"], row["loopq"]
        axes.plot([kl, tool], [y, y], color=theme.soft, linewidth=1, alpha=0.6, zorder=1)
        axes.plot(tool, y, "D" if kind.endswith("fp4") else "s", color=tools, markersize=5, zorder=2)
        axes.plot(kl, y, "o", color=ours, markersize=6, zorder=3)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{kind.upper()}, {row['bits']:.2f} bits" for kind, row in rows])
    axes.invert_yaxis()
    axes.plot([], [], "s", color=tools, label="llama-quantize with an importance matrix")
    axes.plot([], [], "D", color=tools, label="llm-compressor's GPTQ")
    axes.plot([], [], "o", color=ours, label="loopq, default settings")
    axes.legend(frameon=False, loc="lower right")
    axes.set_xlabel("KL to full precision [nat per token]")
    axes.set_title(f"Types of GGUF and FP4: {run['matrices']} matrices of SmolLM2's loop", loc="left")
    axes.grid(axis="x", alpha=0.18)


def draw(rows: Ratios, drawn: Mapping[str, Sequence[float]], models: Sequence[str], theme: Theme) -> str:
    """Both panels as the text of an SVG file."""

    def fill(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
        draw_blindness(left, rows, theme)
        draw_curves(right, drawn, models, theme)

    return as_svg(fill, theme)


def as_svg(fill: Callable[[Figure], None], theme: Theme, height: float = 4.2) -> str:
    """The text of an SVG file in a theme's colours."""
    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme.ink
    )
    settings = {
        "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 11.5, "axes.titleweight": "bold",
        "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": theme.name,
        "grid.color": theme.ink, "figure.facecolor": theme.page, "axes.facecolor": theme.page,
    }  # fmt: skip
    with mpl.rc_context(settings | ink):
        figure = Figure(figsize=(10, height), layout="constrained")
        fill(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return shortened(text.getvalue())


def shortened(svg: str) -> str:
    """An SVG file without indentation, with coordinates to a hundredth of a point: it looks the same."""
    rounded = re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.2f}", svg)
    return re.sub(r"[ \t]*\n\s*", "\n", rounded)


def main() -> None:
    """Draw both files and print what they show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--records", type=Path, default=RECORD, help="folder of records (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "_static", help="folder (default %(default)s)"
    )
    args = parser.parse_args()
    beside, table = newest("peers", args.records), newest("main-table", args.records)
    # Where a model returns hidden states, the record has their squared relative error in place of KL.
    records = [r for r in json.loads(beside.read_text("utf-8"))["records"] if r.get("output") == "logits"]
    rows, source = first_trainings(ratios_of_main(json.loads(table.read_text("utf-8"))["models"])), table
    if 2 * len(ours := first_trainings(ratios_of_peers(records))) >= len(rows):
        rows, source = ours, beside
    drawn, models, lacking = curves(records)
    args.out.mkdir(parents=True, exist_ok=True)
    types = next(iter(json.loads(newest("gguf", args.records).read_text("utf-8")).values()))
    real = newest("smollm2-peers", args.records)
    measured = json.loads(real.read_text("utf-8"))
    lines = [*measured["peers"], *(r for r in measured.get("exl3", []) if r["model"] == SMOLLM2)]
    for theme in (LIGHT, DARK):
        pictures = {
            "claim": as_svg(partial(draw_claim, records=lines, theme=theme), theme, height=4.0),
            "picture": draw(rows, drawn, models, theme),
            "types": as_svg(partial(draw_types, run=types, theme=theme), theme),
        }
        for name, text in pictures.items():
            path = args.out / f"{name}-{theme.name}.svg"
            path.write_text(text, "utf-8")
            print(path)
    print(f"claim: {real.name}")
    print(f"left: {len(rows)} models of {source.name}")
    print(
        f"right: {', '.join(models)} of {beside.name}"
        + (f"; not drawn: {', '.join(lacking)}" if lacking else "")
    )


if __name__ == "__main__":
    main()
