"""Parts of a page (head, sections, tables, heat maps, figures) as HTML that loads nothing."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from loopq.analysis.report.style import Picture
from loopq.terminal.text import visible

#: Shades of a heat map, h0 to h6 in page.css, and the most columns that fit a sheet of paper.
_N_SHADES, _N_COLUMNS = 7, 24


#: What each page of loopq holds.
PAGE = b'<meta name="generator" content="loopq">'


def markdown(data: Any) -> Any:
    """Return text from outside, or data with such text, so that Markdown shows it and nothing in it is markup."""
    if isinstance(data, Mapping):
        return {markdown(key): markdown(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [markdown(value) for value in data]
    if not isinstance(data, str):
        return data
    text = html.escape(visible(data, one_line=True), quote=False)
    # A bracket ends a link only before one of these. A loop has brackets too.
    return re.sub(r"(\](?=[(\[:])|[|*])", r"\\\1", text).replace("`", "'")


def page_html(title: str, intro: str, body: str, data: Mapping[str, Any] | None = None) -> str:
    """Return a whole page."""
    save = script = ""
    if data is not None:
        save = ' <a class="save" download="loopq.json" href="#data">Save the data as JSON</a>'
        # Overflowing weights have a KL that is not finite, which JSON does not support.
        known = json.loads(json.dumps(data), parse_constant=lambda _: None)
        # A "<" inside a script element could end it or open another.
        text = json.dumps(known, sort_keys=True).replace("<", "\\u003c")
        script = f'<script type="application/json" id="data">{text}</script>\n<script>{_file("page.js")}</script>\n'
    name = html.escape(title)
    # Without the icon, browsers request one, even for a local file.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{PAGE.decode()}\n'
        f'<title>{name}</title>\n<link rel="icon" href="data:,">\n<style>{_file("page.css")}</style></head><body>\n'
        f'<header><h1>{name}</h1><p class="intro">{html.escape(intro)}{save}</p></header>\n'
        f"<main>\n{body}\n</main>\n{script}</body></html>\n"
    )


def _file(name: str) -> str:
    return resources.files("loopq.analysis.report").joinpath(name).read_text("utf-8")


def section(name: str, title: str, body: str) -> str:
    """Return a section with its heading."""
    return f'<section id="{name}"><h2>{html.escape(title)}</h2>\n{body}\n</section>'


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def listed(items: Iterable[str]) -> str:
    """Return a list of plain sentences."""
    body = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return f"<ul>{body}</ul>"


@dataclass(frozen=True)
class Cell:
    """One table cell: its HTML, its class, and the sort key if that is not its text."""

    html: str
    css: str = ""
    sort: str | None = None


def number(value: float | None, spec: str = ",.3g") -> Cell:
    """Return the cell of a number. None is a dash and sorts last."""
    if value is None:
        return Cell("-", "number", "")
    return Cell(format(value, spec), "number", repr(float(value)))


def bar(share: float) -> Cell:
    """Return a cell with a bar of a share of its width. A share that is not finite has no bar."""
    if not math.isfinite(share):
        return Cell("", "plot", "")
    width = f"{100 * min(share, 1.0):.1f}%"
    return Cell(f'<div class="bar" style="width:{width}"></div>', "plot", repr(share))


def table(
    label: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    *,
    caption: str = "",
    name: str = "",
) -> str:
    """Return a table in a box that scrolls sideways. The first cell of a row names it.

    Screen readers read the label. An empty head continues the column before it. If the table has a name, its id, a
    click on a head sorts it.
    """
    whole = [[c if isinstance(c, Cell) else Cell(html.escape(c)) for c in row] for row in rows]
    shown = []
    for i, text in enumerate(heads):
        if not text and i:
            continue
        span = next((k for k, later in enumerate(heads[i + 1 :], 1) if later), len(heads) - i)
        css = " class=number" if span == 1 and whole and "number" in whole[0][i].css else ""
        inner = f'<button type="button">{html.escape(text)}</button>' if name else html.escape(text)
        shown.append(f"<th scope=col{css}{f' colspan={span}' if span > 1 else ''}>{inner}</th>")
    body = "".join(f"<tr>{''.join(_cell(c, i == 0) for i, c in enumerate(row))}</tr>\n" for row in whole)
    action = '<span class="action"> Click a heading to sort.</span>' if name else ""
    # Not the table's caption, which would be cut off where the table scrolls.
    top = f'<p class="soft">{html.escape(caption)}{action}</p>' if caption or name else ""
    attributes = f' id={name} class="sortable"' if name else ""
    return top + scroll(
        label, f"<table{attributes}><thead><tr>{''.join(shown)}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    )


def _cell(cell: Cell, first: bool) -> str:
    tag, scope = ("th", " scope=row") if first else ("td", "")
    css = f' class="{cell.css}"' if " " in cell.css else f" class={cell.css}" if cell.css else ""
    sort = "" if cell.sort is None else f' data-sort="{html.escape(cell.sort)}"'
    return f"<{tag}{scope}{css}{sort}>{cell.html}</{tag}>"


def scroll(label: str, inner: str) -> str:
    """Return a box that scrolls sideways, also by keyboard."""
    return f'<div class=scroll tabindex=0 role=region aria-label="{html.escape(label)}">{inner}</div>'


@dataclass(frozen=True)
class Shades:
    """Shades of a heat map for positive values: equal ratios from `low` to `top`."""

    low: float
    top: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Shades:
        """Shades for all values together. They span at least a factor of 4, so that equal values look equal."""
        known = [v for v in values if v is not None]
        top = max(known, default=1.0) or 1.0
        return cls(max(min([*known, top / 4]), top / 100), top)

    def of_value(self, value: float) -> int:
        """Shade of a value, 0 to 6."""
        place = math.log(max(value, self.low) / self.low) / math.log(self.top / self.low)
        return min(int(place * _N_SHADES), _N_SHADES - 1)

    def legend(self) -> str:
        """Return the legend of the shades, in percent."""
        ends = [self.low * (self.top / self.low) ** (i / _N_SHADES) for i in range(_N_SHADES + 1)]
        shown = [f"{percent(a)} to {percent(b)}" for a, b in itertools.pairwise(ends)]
        shown[0] = f"under {percent(ends[1])}"
        items = "".join(f"<li class=h{i}>{text}</li>" for i, text in enumerate(shown))
        return f'<ul class="legend" aria-label="shades, in percent">{items}</ul>'


def percent(value: float) -> str:
    """Format a share in percent in at most four characters."""
    value *= 100
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.0995 else f"{value:.1g}"


def heat_map(title: str, rows: Mapping[str, Sequence[float | None]], shades: Shades) -> str:
    """Return a map of shares by row and step, as a table of numbers on shades. Rows may have different lengths.

    Compared maps have the same shades.
    """
    n_steps = max(map(len, rows.values()))
    every = -(-n_steps // _N_COLUMNS)
    steps = [t for t in range(n_steps) if t % every == 0 or t == n_steps - 1]
    head = "".join(f"<th scope=col>{t}</th>" for t in steps)

    def cell(values: Sequence[float | None], t: int) -> str:
        value = values[t] if t < len(values) else None
        if value is None:
            return "<td>-</td>" if t < len(values) else "<td></td>"
        return f"<td class=h{shades.of_value(value)}>{percent(value)}</td>"

    body = "".join(
        f"<tr><th scope=row>{html.escape(name)}</th>{''.join(cell(values, t) for t in steps)}</tr>\n"
        for name, values in rows.items()
    )
    note = f", 1 step of {every} is shown" if every > 1 else ""
    inner = (
        f'<table class=heat data-unit="%"><caption>{html.escape(title)} [%]{note}</caption>'
        f"<thead><tr><th scope=col>step</th>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    )
    readout = '<p class="readout action" aria-hidden="true">Point at a number, or use the arrow keys.</p>'
    return f'<figure class="map">{scroll(title, inner)}{shades.legend()}{readout}</figure>'


def figure_html(picture: Picture) -> str:
    """Return a figure with its title and caption as HTML."""
    wide = ' class="wide"' if picture.wide else ""
    said = f"<figcaption>{html.escape(picture.caption)}</figcaption>" if picture.caption else ""
    return (
        f'<figure id="figure-{picture.name}"{wide}><h3>{html.escape(picture.title)}</h3>'
        f'<div class="plot">{picture.svg()}</div>{said}</figure>'
    )


def described(title: str, caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell | str]]) -> str:
    """Return a table below a heading."""
    return f"<h3>{html.escape(title)}</h3>" + table(title, heads, rows, caption=caption)


def percent_cell(value: float | None) -> Cell:
    """Return the cell of a share."""
    return number(None if value is None else 100 * value, ".1f")
