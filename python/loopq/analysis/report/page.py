"""The page: the treatment of every weight, the place of the error, its cost, and the diagnosis, if known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.analysis.report import diagnosis as diagnosed
from loopq.analysis.report.alternatives import alternatives, facts
from loopq.analysis.report.errors import error_maps
from loopq.analysis.report.markup import PAGE, page_html, section
from loopq.analysis.report.weights import done
from loopq.storage.files import json_bytes
from loopq.storage.folders import write_output

Data = Mapping[str, Any]


def write_page(
    out: str | Path,
    *,
    diagnosis: Data | None = None,
    weights: Mapping[str, Sequence[Data]] | None = None,
    errors: Data | None = None,
    measured: Data | None = None,
) -> Path:
    """Write everything known of a model and its quantized weights as one HTML page that loads nothing.

    Parameters
    ----------
    out : path
        HTML file.
    diagnosis : mapping, optional
        Result of `loopq.diagnose` or `diagnose_dump`, or its JSON. Its figures need matplotlib.
    weights : mapping of str to sequence of mapping, optional
        Treatment of every tensor, by the checkpoint's name (`loopq.analysis.report.weights.tensors`).
    errors : mapping, optional
        "on" describes the data. "weights" holds `loopq.evaluation.layers.layer_errors` by the checkpoint's name.
    measured : mapping, optional
        "on" has "n_prompts", "n_tokens", "source", "n_steps" and "n_seeds". "weights" has `Measurement.summary` of
        full precision, then of each checkpoint. Checkpoints add "kl_95" (or None).

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ConfigError
        If the data are not a diagnosis, or of another version.
    MissingExtraError
        If there is a diagnosis and matplotlib is not installed.
    """
    return write_output(out, render(diagnosis, weights, errors, measured).encode(), PAGE)


def write_data(diagnosis: Data, out: str | Path) -> Path:
    """Write a diagnosis as JSON."""
    diagnosed.check(diagnosis)
    return write_output(out, json_bytes(diagnosis), diagnosed.DATA)


def render(
    diagnosis: Data | None = None,
    weights: Mapping[str, Sequence[Data]] | None = None,
    errors: Data | None = None,
    measured: Data | None = None,
) -> str:
    """Return the page as text. Parameters as for `write_page`."""
    if diagnosis is not None:
        diagnosed.check(diagnosis)
    known = {"diagnosis": diagnosis, "weights": weights, "errors": errors, "measured": measured}
    bodies = (
        ("weights", "What was done to every weight", done(weights) if weights else ""),
        ("where", "Where the error is", error_maps(errors, diagnosis)),
        ("cost", "How far from full precision", alternatives(measured) if measured else ""),
        ("loop", "What the loop does", diagnosed.loop(diagnosis) if diagnosis else ""),
        ("again", "To repeat the diagnosis", diagnosed.again(diagnosis) if diagnosis else ""),
    )
    there = [(name, title, body) for name, title, body in bodies if body]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in there)
    top = [
        facts(measured) if measured else "",
        f'<nav class="action" aria-label="contents"><ul>{links}</ul></nav>',
    ]
    data = {name: value for name, value in known.items() if value is not None}
    body = "\n".join([*top, *(section(*entry) for entry in there)])
    return page_html(_title(diagnosis, weights, measured), _intro(diagnosis, measured), body, data)


def _title(diagnosis: Data | None, weights: Mapping[str, Any] | None, measured: Data | None) -> str:
    model = (measured or {}).get("model") or (diagnosis["model"]["name"] if diagnosis else "") or "Model"
    return f"{model}, quantized" if weights or measured else f"Diagnosis of {model}"


def _intro(diagnosis: Data | None, measured: Data | None) -> str:
    """Describe the measured text in one line."""
    lines = []
    if measured:
        on = measured["on"]
        lines.append(
            f"Measured on {on['n_prompts']} prompts, {on['n_tokens']:,} tokens of {on['source']}, {on['n_steps']} "
            f"steps, initial states of each: {on['n_seeds']}, the same for all weights."
        )
        lines += [f"{s['name']}: {s['warning']}." for s in measured["weights"] if "warning" in s]
    if diagnosis:
        model, data = diagnosis["model"], diagnosis["data"]
        size = f", {model['n_parameters']:,} parameters" if model["n_parameters"] else ""
        lines.append(
            f"Diagnosed: system {model['system']}, {model['n_steps']} steps{size}, {model['dtype']}; "
            f"{data['n_prompts']} prompts, {data['n_tokens']:,} tokens of {data['source']}."
        )
    return " ".join(lines)
