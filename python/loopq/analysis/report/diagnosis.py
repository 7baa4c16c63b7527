"""The diagnosis on the page: its figures, its verdict on every layer, and how to reproduce it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from loopq.analysis.report.markup import Cell, figure_html, listed, number, paragraph, table
from loopq.analysis.report.sections import all_figures, all_tables
from loopq.analysis.report.style import short_names
from loopq.errors import ConfigError

FORMAT = "loopq-diagnosis"
#: What each file of a diagnosis holds.
DATA = f'"format": "{FORMAT}"'.encode()
VERSION = 1


def check(diagnosis: Mapping[str, Any]) -> None:
    """Reject data that are not a diagnosis of this version.

    Raises
    ------
    ConfigError
        If the format or version is different.
    """
    if diagnosis.get("format") != FORMAT:
        raise ConfigError(f"not a diagnosis: its format is {diagnosis.get('format')!r}, expected {FORMAT!r}")
    if diagnosis.get("version") != VERSION:
        raise ConfigError(
            f"diagnosis of version {diagnosis.get('version')!r}; this loopq reads version {VERSION}"
        )


def loop(d: Mapping[str, Any]) -> str:
    """Return the section with figures and tables."""
    parts = [
        paragraph("Of the model in full precision, before any weight is changed."),
        listed(d["summary"]),
        f'<div class="figures">{"".join(map(figure_html, all_figures(d)))}</div>',
        _layers(d),
        *all_tables(d),
        _unavailable(d),
    ]
    return "\n".join(filter(None, parts))


def _layers(d: Mapping[str, Any]) -> str:
    ranks = d["sections"].get("ranks") or {}
    alone = "output error" if d["model"]["output"] == "hidden" else "changed"
    heads = (
        "layer", "verdict", "role", "rank, step 0", "rank, all steps", "width", "gain", "step-0 energy [%]",
        f"{alone} when rounded alone [%]",
    )  # fmt: skip
    short = short_names([layer["name"] for layer in d["layers"]])
    rows = [
        _layer(layer, ranks.get("layers", {}).get(layer["input_of"]) or {}, short[layer["name"]])
        for layer in d["layers"]
    ]
    caption = (
        f"Rank: number of eigenvalues above {ranks.get('threshold', 1e-3):g} of the largest; gain: rank of the sum "
        "over all steps, over the rank at step 0; energy: share of the sum of squared inputs that belongs to step 0."
    )
    return '<div class="landscape"><h3>Layer by layer</h3>' + table(
        "Layer by layer", heads, rows, caption=caption, name="layers"
    ) + "</div>"  # fmt: skip


def _layer(layer: Mapping[str, Any], ranks: Mapping[str, Any], short: str) -> list[Cell | str]:
    ablation = layer["ablation"] or {}
    changed = ablation.get("changed")
    alone = ablation.get("output_error_last") if changed is None else changed
    share = ranks.get("step0_trace_share")
    flags = [
        text
        for key, text in (("blind", "blind"), ("dominated", "step 0 dominates"), ("exposed", "exposed"))
        if layer["verdict"][key]
    ]
    marks = "".join(f'<span class="flag">{text}</span>' for text in flags)
    verdict = layer["verdict"]["text"]
    return [
        Cell(html.escape(short), "name"),
        Cell(marks + html.escape(verdict), "words", " ".join(flags) + verdict),
        layer["role"],
        number(ranks.get("first", {}).get("rank"), ",d"),
        number(ranks.get("all", {}).get("rank"), ",d"),
        number(ranks.get("dim"), ",d"),
        number(ranks.get("rank_gain"), ".2f"),
        number(None if share is None else 100 * share, ".1f"),
        number(None if alone is None else 100 * alone, ".2f"),
    ]


def _unavailable(d: Mapping[str, Any]) -> str:
    if not d["unavailable"]:
        return ""
    rows = "".join(
        f"<li><strong>{html.escape(u['section'])}</strong>: {html.escape(u['reason'])}</li>"
        for u in d["unavailable"]
    )
    return f'<h3>Parts that could not run</h3><ul id="unavailable">{rows}</ul>'


def again(d: Mapping[str, Any]) -> str:
    """Return the section with settings, data, versions and times."""
    blocks = {name.capitalize(): d[name] for name in ("settings", "data", "versions", "seconds")}
    tables = "".join(
        f"<div><h3>{name}</h3>"
        + table(name, ["what", "value"], [[str(k), _plain(v)] for k, v in sorted(block.items())])
        + "</div>"
        for name, block in blocks.items()
        if block
    )
    return f'<div class="figures">{tables}</div>'


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
