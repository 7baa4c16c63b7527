"""Colours and line styles of the page, and figures as inline SVG."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loopq.errors import require

# Colours of Okabe and Ito, distinct for every kind of colour blindness. Line style and marker differ as well.
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
# Lightness changes evenly, so the map survives printing in grey. Dark means high.
MAP = "cividis_r"

#: Size of letters inside cells and boxes, in points; all others have that of the style.
SMALL = 8
#: Panels in a row.
ACROSS = 3
# Inches of the wider of the two columns of a page.
_COLUMN = 6.3

_RC = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    # One size for all letters: at least 9 pixels on a screen of 1,100.
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "hatch.linewidth": 0.8,
}


@dataclass(frozen=True)
class Picture:
    """One matplotlib figure of the page. Its short name is unique there, and its caption tells content and meaning."""

    name: str
    title: str
    caption: str
    figure: Any

    @property
    def wide(self) -> bool:
        """Whether it needs the whole page width instead of one of two columns."""
        return float(self.figure.get_size_inches()[0]) > _COLUMN

    def svg(self) -> str:
        """The figure as an SVG element. Its ids are unique on the page."""
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
    """Draw in the page's style. The salt makes the ids inside the SVG reproducible."""
    matplotlib = require("matplotlib")
    with matplotlib.rc_context(_RC | {"svg.hashsalt": salt}):
        yield


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of the given size in inches and its axes."""
    figure, (axes,) = panels(1, width, height)
    return figure, axes


def panels(n: int, width: float = 4.0, height: float = 3.4, across: int = ACROSS) -> tuple[Any, list[Any]]:
    """Return a figure with n axes of the given size in inches each, with a fixed number per row."""
    columns = min(n, across)
    rows = -(-n // columns)
    figure_module = require("matplotlib.figure")
    figure = figure_module.Figure(figsize=(columns * width, rows * height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in every[n:]:
        spare.remove()
    return figure, every[:n]


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
    """Short names of layers shown together: without their common path, up to a block's number."""
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
