"""The diagnosis on the page: its figures, what it says of every layer, and how to make it again."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from loopq.errors import ConfigError
from loopq.report.figures import VARIANT_NAMES, all_figures
from loopq.report.markup import Cell, figure_html, listed, number, paragraph, table
from loopq.report.style import short_names

FORMAT = "loopq-diagnosis"
VERSION = 1


def check(diagnosis: Mapping[str, Any]) -> None:
    """Refuse what is no diagnosis of this version.

    Raises
    ------
    ConfigError
        It has another format or version.
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
        _injection(d),
        _perturbations(d),
        _overlaps(d),
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


def _described(title: str, caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell | str]]) -> str:
    return f"<h3>{html.escape(title)}</h3>" + table(title, heads, rows, caption=caption)


def _percent(value: float | None) -> Cell:
    return number(None if value is None else 100 * value, ".1f")


def _injection(d: Mapping[str, Any]) -> str:
    found = d["sections"].get("injection")
    if not found or d["model"]["output"] == "hidden":
        return ""
    rows: list[list[Cell | str]] = []
    for setting, runs in sorted(found.items(), reverse=True):
        for pairing in ("paired", "unpaired"):
            for variant, name in VARIANT_NAMES.items():
                run = (runs[pairing] or {}).get(variant)
                if run:
                    ends = [_percent(run["agreement"][0]), _percent(run["agreement"][-1])]
                    low, high = (_percent(run["final_agreement"][end]).html for end in ("low", "high"))
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
    return _described("Where the error enters", caption, heads, rows)


def _perturbations(d: Mapping[str, Any]) -> str:
    found = d["sections"].get("perturbation")
    if not found:
        return ""
    logits = d["model"]["output"] != "hidden"
    key = "agreement" if logits else "output_error"
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["perturbation"], row["location"]), []).append(row)
    rows: list[list[Cell | str]] = []
    for (kind, place), draws in sorted(groups.items()):
        mean = sum(draw[key] for draw in draws) / len(draws)
        norm = sum(draw["norm"] for draw in draws) / len(draws)
        rows.append([kind, place, number(norm), number(len(draws), "d"), _percent(mean)])
    caption = (
        "Weight changes other than rounding, at the exposed layers and in the core, with paired initial states. Rank-4 "
        "updates have the same norm at both places; the noise has the output error that rounding has there."
    )
    what = "agreement, last step [%]" if logits else "output error, last step [%]"
    return _described("Other perturbations", caption, ("perturbation", "place", "norm", "draws", what), rows)


def _overlaps(d: Mapping[str, Any]) -> str:
    found = (d["sections"].get("overlap") or {}).get("overlaps")
    if not found:
        return ""
    rows: list[list[Cell | str]] = [
        [
            r["between"],
            number(r["k"], "d"),
            number(100 * r["overlap"], ".2f"),
            number(100 * r["chance"], ".2f"),
        ]
        for r in sorted(found, key=lambda r: r["k"])
    ]
    caption = (
        "Mean squared cosine between the leading directions of the state, and its expectation for two independent "
        "spaces of that dimension. An overlap at chance means that one side is noise."
    )
    heads = ("between", "directions", "overlap [%]", "chance [%]")
    return _described("Do steps share their directions?", caption, heads, rows)


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
    blocks = {
        "Settings": d["settings"],
        "Data": d["data"],
        "Versions": d["versions"],
        "Seconds": d["seconds"],
    }
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
