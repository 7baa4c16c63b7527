"""The diagnosis as one self-contained HTML page that needs no network and can be printed."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from loopq.checkpoint.files import write_json, write_text
from loopq.errors import ConfigError
from loopq.report.figures import VARIANT_NAMES, all_figures, gain_scatter
from loopq.report.style import Picture, short_names

FORMAT = "loopq-diagnosis"
VERSION = 1
_WIDE = ("loop", "ranks", "spectra", "rollout", "feedback")
Cell = tuple[str, str, str]


def write_report(
    diagnosis: Mapping[str, Any],
    out: str | Path,
    *,
    quantized: Mapping[str, Mapping[str, Any]] | None = None,
    kept: Mapping[str, str] | None = None,
    compared: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Write a diagnosis as an HTML page.

    Parameters
    ----------
    diagnosis : mapping
        Result of `loopq.diagnose.survey.diagnose` or `diagnose_dump`, or the JSON of one.
    out : path
        HTML file.
    quantized : mapping of str to mapping, optional
        Report of each quantized layer by parameter name, shown as a column of the table.
    kept : mapping of str to str, optional
        Why each of the model's other parameters was left as it is.
    compared : sequence of mapping, optional
        Models of the plot of gap closed against rank gain (`figures.gain_scatter`).

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ConfigError
        The data is not a diagnosis of this version.
    MissingExtraError
        matplotlib is not installed.
    """
    text = render(diagnosis, quantized=quantized, kept=kept, compared=compared)
    return write_text(out, text)


def write_data(diagnosis: Mapping[str, Any], out: str | Path) -> Path:
    """Write the diagnosis as JSON."""
    _check(diagnosis)
    path = Path(out)
    write_json(path, diagnosis)
    return path


def render(
    diagnosis: Mapping[str, Any],
    *,
    quantized: Mapping[str, Mapping[str, Any]] | None = None,
    kept: Mapping[str, str] | None = None,
    compared: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return the page as text; parameters as in `write_report`."""
    _check(diagnosis)
    pictures = all_figures(diagnosis)
    if compared:
        pictures.append(gain_scatter(compared))
    model = diagnosis["model"]
    title = f"Diagnosis of {model['name']}"
    # A "<" inside a script element could end it or open another.
    data = json.dumps(diagnosis, sort_keys=True, allow_nan=False).replace("<", "\\u003c")
    parts = [
        _head(title),
        f"<header><h1>{html.escape(title)}</h1>{_intro(diagnosis)}</header>",
        "<main>",
        _summary(diagnosis),
        "<h2>What the loop does</h2>",
        '<div class="figures">',
        *(figure_html(p) for p in pictures),
        "</div>",
        _layer_table(diagnosis, quantized),
        _kept(kept),
        _injection(diagnosis),
        _perturbations(diagnosis),
        _overlaps(diagnosis),
        _unavailable(diagnosis),
        _settings(diagnosis),
        "</main>",
        f'<script type="application/json" id="diagnosis">{data}</script>',
        f"<script>{_file('page.js')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _head(title: str) -> str:
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            # Without it browsers request an icon, even for a local file.
            '<link rel="icon" href="data:,">',
            f"<style>{_file('page.css')}</style></head><body>",
        )
    )


def page_html(title: str, intro: str, body: str) -> str:
    """Return a page without data in the style of a diagnosis: heading, one line of introduction, and HTML below."""
    top = f'<header><h1>{html.escape(title)}</h1><p class="intro">{html.escape(intro)}</p></header>'
    return f"{_head(title)}\n{top}\n<main>\n{body}\n</main>\n</body></html>\n"


def _file(name: str) -> str:
    return resources.files("loopq.report").joinpath(name).read_text("utf-8")


def _check(diagnosis: Mapping[str, Any]) -> None:
    if diagnosis.get("format") != FORMAT:
        raise ConfigError(f"not a diagnosis: its format is {diagnosis.get('format')!r}, expected {FORMAT!r}")
    if diagnosis.get("version") != VERSION:
        raise ConfigError(
            f"diagnosis of version {diagnosis.get('version')!r}; this loopq reads version {VERSION}"
        )


def _intro(d: Mapping[str, Any]) -> str:
    model, data = d["model"], d["data"]
    size = f", {model['n_parameters']:,} parameters" if model["n_parameters"] else ""
    text = (
        f"System {model['system']}, {model['n_steps']} recurrence steps{size}, {model['dtype']}; "
        f"{data['n_prompts']} prompts, {data['n_tokens']:,} tokens from {data['source']}."
    )
    save = '<a class="save" download="diagnosis.json" href="#diagnosis">Save the data as JSON</a>'
    return f'<p class="intro">{html.escape(text)} {save}</p>'


def _summary(d: Mapping[str, Any]) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in d["summary"])
    return f'<ul class="summary">{items}</ul>'


def figure_html(picture: Picture) -> str:
    """Return a figure with its title and caption as HTML."""
    wide = ' class="wide"' if picture.name in _WIDE else ""
    return (
        f'<figure id="figure-{picture.name}"{wide}><h3>{html.escape(picture.title)}</h3>'
        f'<div class="plot">{picture.svg()}</div><figcaption>{html.escape(picture.caption)}</figcaption></figure>'
    )


def _number(value: float | None, spec: str = ",.3g") -> Cell:
    if value is None:
        return "number", "", "-"
    return "number", repr(float(value)), format(value, spec)


def _layer_table(d: Mapping[str, Any], quantized: Mapping[str, Mapping[str, Any]] | None) -> str:
    ranks = (d["sections"].get("ranks") or {}).get("layers", {})
    logits = d["model"]["output"] != "hidden"
    heads = [
        ("layer", ""),
        ("role", ""),
        ("shape", ""),
        ("rank, step 0", "number"),
        ("rank, all steps", "number"),
        ("width", "number"),
        ("gain", "number"),
        ("step-0 energy [%]", "number"),
        ("changed when rounded alone [%]" if logits else "output error when rounded alone [%]", "number"),
        ("verdict", ""),
    ]
    if quantized is not None:
        heads.insert(-1, ("quantized as", ""))
    rows = []
    short = short_names([layer["name"] for layer in d["layers"]])
    for layer in d["layers"]:
        cells = _cells(layer, ranks.get(layer["input_of"]) or {}, logits, short[layer["name"]])
        if quantized is not None:
            done = _done(quantized.get(layer["name"]))
            cells.insert(-1, ("done", done, html.escape(done)))
        # The first cell names the row, for those who hear the table.
        first, *others = (f'class="{c}" data-sort="{html.escape(k)}">{t}' for c, k, t in cells)
        rows.append(f'<th scope="row" {first}</th>' + "".join(f"<td {cell}</td>" for cell in others))
    head = "".join(f'<th class="{c}" scope="col"><button type="button">{h}</button></th>' for h, c in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    threshold = (d["sections"].get("ranks") or {}).get("threshold", 1e-3)
    return (
        '<section class="landscape"><h2>Layer by layer</h2><div class="scroll"><table class="sortable" id="layers">'
        '<caption><span class="action">Click a heading to sort. </span>Rank: number of '
        f"eigenvalues above {threshold:g} of the largest; gain: rank of the sum over all steps, over the rank at step "
        "0; energy: share of the sum of squared inputs that belongs to step 0.</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _kept(kept: Mapping[str, str] | None) -> str:
    """Parameters that were not quantized, those of one reason in one row."""
    if not kept:
        return ""
    by_reason: dict[str, list[str]] = {}
    for name, reason in kept.items():
        by_reason.setdefault(reason, []).append(name)
    rows = [[reason, ", ".join(names), str(len(names))] for reason, names in by_reason.items()]
    caption = "Parameters that have the bytes that they had before."
    return html_table("Left as they are", caption, ("reason", "parameters", "number"), rows, 2)


def _cells(layer: Mapping[str, Any], ranks: Mapping[str, Any], logits: bool, short: str) -> list[Cell]:
    ablation = layer["ablation"] or {}
    value = ablation.get("changed") if logits else ablation.get("output_error_last")
    share = ranks.get("step0_trace_share")
    flags = [
        text
        for key, text in (("blind", "blind"), ("dominated", "step 0 dominates"), ("exposed", "exposed"))
        if layer["verdict"][key]
    ]
    marks = "".join(f'<span class="flag">{text}</span>' for text in flags)
    verdict = layer["verdict"]["text"]
    return [
        ("name", layer["name"], html.escape(short)),
        ("", layer["role"], html.escape(layer["role"])),
        (
            "number",
            str(layer["shape"][0] * layer["shape"][1]),
            f"{layer['shape'][0]:,} x {layer['shape'][1]:,}",
        ),
        _number(ranks.get("first", {}).get("rank"), ",d"),
        _number(ranks.get("all", {}).get("rank"), ",d"),
        _number(ranks.get("dim"), ",d"),
        _number(ranks.get("rank_gain"), ".2f"),
        _number(None if share is None else 100 * share, ".1f"),
        _number(None if value is None else 100 * value, ".2f"),
        ("words", " ".join(flags) + verdict, marks + html.escape(verdict)),
    ]


def _done(report: Mapping[str, Any] | None) -> str:
    """How a layer was quantized, from its quantization report."""
    if report is None:
        return "not quantized"
    group = "per channel" if report.get("group_size") == -1 else f"g{report.get('group_size')}"
    text = f"{str(report.get('method_done', '?')).upper()} INT{report.get('bits')} {group}"
    steps = report.get("steps")
    if steps:
        text += f", calibrated on {len(steps)} step{'s' if len(steps) > 1 else ''}"
    proxy, plain = report.get("proxy"), report.get("proxy_rtn")
    if proxy is not None and plain:
        text += f", loss {proxy / plain:.2f} times that of rounding"
    return text


def html_table(
    title: str, caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], n_text: int
) -> str:
    """Return an unsorted table under a heading; the first `n_text` columns are text, the others numbers."""

    def cell(i: int, text: str, head: bool) -> str:
        tag, scope = ("th", f" scope={'col' if head else 'row'}") if head or i == 0 else ("td", "")
        return f"<{tag}{scope}{'' if i < n_text else ' class=number'}>{html.escape(text)}</{tag}>"

    def cells(row: Sequence[str], head: bool = False) -> str:
        return f"<tr>{''.join(cell(i, text, head) for i, text in enumerate(row))}</tr>"

    name = html.escape(title, quote=True)
    return (
        f'<h2>{name}</h2><div class=scroll tabindex=0 role=region aria-label="{name}"><table class=settings>'
        f"<caption>{html.escape(caption)}</caption><thead>{cells(heads, True)}</thead>"
        f"<tbody>{''.join(map(cells, rows))}</tbody></table></div>"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _injection(d: Mapping[str, Any]) -> str:
    found = d["sections"].get("injection")
    if not found or d["model"]["output"] == "hidden":
        return ""
    rows = []
    for setting, runs in sorted(found.items(), reverse=True):
        for pairing in ("paired", "unpaired"):
            for variant, name in VARIANT_NAMES.items():
                run = (runs[pairing] or {}).get(variant)
                if run:
                    ends = [_percent(run["agreement"][0]), _percent(run["agreement"][-1])]
                    low, high = (_percent(run["final_agreement"][end]) for end in ("low", "high"))
                    rows.append([setting, pairing, name, *ends, f"{low} to {high}", f"{run['kl'][-1]:.4f}"])
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
    return html_table("Where the error enters", caption, heads, rows, 3)


def _perturbations(d: Mapping[str, Any]) -> str:
    found = d["sections"].get("perturbation")
    if not found:
        return ""
    logits = d["model"]["output"] != "hidden"
    key = "agreement" if logits else "output_error"
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["perturbation"], row["location"]), []).append(row)
    rows = []
    for (kind, place), draws in sorted(groups.items()):
        mean = sum(draw[key] for draw in draws) / len(draws)
        norm = sum(draw["norm"] for draw in draws) / len(draws)
        rows.append([kind, place, f"{norm:.3g}", str(len(draws)), _percent(mean)])
    caption = (
        "Weight changes other than rounding, at the exposed layers and in the core, with paired initial states. Rank-4 "
        "updates have the same norm at both places; the noise has the output error that rounding has there."
    )
    what = "agreement, last step [%]" if logits else "output error, last step [%]"
    return html_table(
        "Other perturbations", caption, ("perturbation", "place", "norm", "draws", what), rows, 2
    )


def _overlaps(d: Mapping[str, Any]) -> str:
    found = (d["sections"].get("overlap") or {}).get("overlaps")
    if not found:
        return ""
    rows = [
        [r["between"], str(r["k"]), f"{100 * r['overlap']:.2f}", f"{100 * r['chance']:.2f}"]
        for r in sorted(found, key=lambda r: r["k"])
    ]
    caption = (
        "Mean squared cosine between the leading directions of the state, and its expectation for two independent "
        "spaces of that dimension. An overlap at chance means that one side is noise."
    )
    heads = ("between", "directions", "overlap [%]", "chance [%]")
    return html_table("Do steps share their directions?", caption, heads, rows, 1)


def _unavailable(d: Mapping[str, Any]) -> str:
    if not d["unavailable"]:
        return ""
    rows = "".join(
        f"<li><strong>{html.escape(u['section'])}</strong>: {html.escape(u['reason'])}</li>"
        for u in d["unavailable"]
    )
    return f'<h2>Sections that could not run</h2><ul id="unavailable">{rows}</ul>'


def _settings(d: Mapping[str, Any]) -> str:
    def rows(table: Mapping[str, Any]) -> str:
        return "".join(
            f"<tr><th scope=row>{html.escape(str(key))}</th><td>{html.escape(_plain(value))}</td></tr>"
            for key, value in sorted(table.items())
        )

    seconds = {f"seconds, {name}": value for name, value in d["seconds"].items()}
    blocks = (
        ("Settings", d["settings"]),
        ("Data", d["data"]),
        ("Versions", d["versions"]),
        ("Time", seconds),
    )
    tables = "".join(
        f"<h3>{name}</h3><table class=settings><tbody>{rows(table)}</tbody></table>"
        for name, table in blocks
        if table
    )
    return f"<h2>To reproduce this</h2>{tables}"


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
