"""Colours and line styles of the page, and figures as inline SVG."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loopq.lazy import require

# Okabe and Ito's colours, distinct for every kind of colour blindness; line style and marker differ as well.
SERIES = (
    ("#0072B2", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#000000", ":", "D"),
    ("#CC79A7", (0, (5, 1, 1, 1)), "v"),
    ("#E69F00", (0, (3, 1)), "P"),
    ("#56B4E9", (0, (1, 1)), "X"),
)
ALARM = "#D55E00"
#: On a light cell; plain black becomes light on a dark page.
INK = "#111111"
# Lightness changes evenly, so that the map survives printing in grey; dark is high.
MAP = "cividis_r"

_RC = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "hatch.linewidth": 0.8,
}


@dataclass(frozen=True)
class Picture:
    """One figure of the page.

    Parameters
    ----------
    name : str
        Short name, unique on the page.
    title : str
        Heading.
    caption : str
        What the figure shows and what it means, in sentences.
    figure : Any
        matplotlib Figure.
    """

    name: str
    title: str
    caption: str
    figure: Any

    def svg(self) -> str:
        """The figure as an SVG element whose ids are unique on the page."""
        buffer = io.StringIO()
        with styled(self.name):
            self.figure.savefig(
                buffer,
                format="svg",
                bbox_inches="tight",
                transparent=True,
                metadata={"Date": None, "Creator": None},
            )
        text = buffer.getvalue()
        text = text[text.index("<svg") :].strip()
        text = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', text)
        text = re.sub(r"url\(#([^)]+)\)", rf"url(#{self.name}-\1)", text)
        text = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{self.name}-\2"', text)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        # Black is the page's ink, which is light on dark paper.
        text = text.replace("#000000", "currentColor")
        label = html.escape(f"{self.title}. {self.caption}", quote=True)
        return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


@contextlib.contextmanager
def styled(salt: str) -> Iterator[None]:
    """Draw in the page's style; the salt makes the ids inside the SVG the same in every run."""
    matplotlib = require("matplotlib")
    with matplotlib.rc_context(_RC | {"svg.hashsalt": salt}):
        yield


def canvas(width: float, height: float, n_columns: int = 1) -> tuple[Any, Any]:
    """Return a figure of the given size in inches and its axes, one or a row of several."""
    figure_module = require("matplotlib.figure")
    figure = figure_module.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, n_columns)


def label(axes: Any, x: str, y: str, title: str = "") -> None:
    """Set axis labels, with units in square brackets, and a title."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)


def line(axes: Any, index: int, x: Any, y: Any, name: str, **more: Any) -> None:
    """Draw one series in the style of its index."""
    colour, dash, marker = SERIES[index % len(SERIES)]
    axes.plot(x, y, color=colour, linestyle=dash, marker=marker, label=name, **more)


def whole_numbers(axis: Any) -> None:
    """Put ticks at whole numbers only."""
    ticker = require("matplotlib.ticker")
    axis.set_major_locator(ticker.MaxNLocator(integer=True))


def short_name(name: str) -> str:
    """A parameter's name without the prefix and suffix that are common to a model's parameters."""
    for prefix in ("transformer.", "model.", "base_causallm.", "gpt_neox.", "module."):
        name = name.removeprefix(prefix)
    return name.removesuffix(".weight")


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Short names of layers shown together: without the path they share, up to a block's number."""
    short = {name: short_name(name) for name in names}
    if len(short) < 2:
        return short
    common: list[str] = []
    for parts in zip(*(text.split(".")[:-1] for text in short.values()), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    rest = [text.split(".")[len(common)] for text in short.values()]
    if any(part.isdigit() for part in rest):
        common = common[:-1]
    return {name: ".".join(text.split(".")[len(common) :]) for name, text in short.items()}
