"""What `loopq evaluate` measured, as a self-contained HTML page: KL by weights and bytes, prompts by change."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.checkpoint.files import write_text
from loopq.report.page import html_table, page_html
from loopq.table import size

#: Prompts shown of each set of weights, and characters of each.
_N_PROMPTS, _N_CHARACTERS = 8, 160
_WIDTH, _HEIGHT, _MARGIN = 640, 280, 60


def write_evaluation(
    summaries: Sequence[Mapping[str, Any]],
    measured_on: Mapping[str, Any],
    texts: Sequence[str],
    out: str | Path,
) -> Path:
    """Write measurements of several sets of weights as an HTML page.

    Parameters
    ----------
    summaries : sequence of mapping
        `Measurement.summary` of full precision, then of each set of weights, these with "kl_95" (interval or None)
        and "kl_by_prompt" (nats per token of each prompt).
    measured_on : mapping
        "n_prompts", "n_tokens", "source", "n_steps" and "n_seeds".
    texts : sequence of str
        The prompts.
    out : path
        HTML file.

    Returns
    -------
    Path
        The file.
    """
    intro = (
        f"{measured_on['n_prompts']} prompts, {measured_on['n_tokens']:,} tokens of {measured_on['source']}, "
        f"{measured_on['n_steps']} steps, initial states of each: {measured_on['n_seeds']}, the same for all weights."
    )
    quantized = summaries[1:]
    body = [_weights(summaries), _plot(quantized), *(_prompts(found, texts) for found in quantized)]
    return write_text(out, page_html("How far from full precision", intro, "\n".join(body)))


def _weights(summaries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for found in summaries:
        interval = found.get("kl_95")
        rows.append([
            found["name"],
            f"{found['kl']:.5f}",
            f"{interval[0]:.5f} to {interval[1]:.5f}" if interval else "-",
            f"{100 * found['agreement']:.2f}",
            size(found["n_bytes"]) if found.get("n_bytes") else "-",
        ])  # fmt: skip
    heads = ("weights", "KL [nat per token]", "95 %", "agreement [%]", "bytes")
    caption = (
        "KL: divergence from full precision, mean over tokens; agreement: same top-1 token; "
        "95 %: bootstrap over prompts."
    )
    return html_table("Weights", caption, heads, rows, 1)


def _plot(quantized: Sequence[Mapping[str, Any]]) -> str:
    """KL against bytes: a point for each set of weights whose bytes are known."""
    points = [(found["n_bytes"], found["kl"], found["name"]) for found in quantized if found.get("n_bytes")]
    if len(points) < 2:
        return ""
    most, top = max(p[0] for p in points), max(p[1] for p in points) or 1.0

    def place(n_bytes: float, kl: float) -> tuple[float, float]:
        """Both axes start at zero; room is left for names."""
        return _MARGIN + n_bytes / most * 0.7 * (_WIDTH - _MARGIN), _HEIGHT - 40 - kl / top * (_HEIGHT - 70)

    marks = []
    for n_bytes, kl, name in points:
        x, y = place(n_bytes, kl)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="var(--link)"/>')
        marks.append(f'<text x="{x + 9:.1f}" y="{y + 4:.1f}">{html.escape(name)}</text>')
    x, y = place(most, 0)
    label = html.escape("; ".join(f"{name}: {size(n)}, KL {kl:.5f}" for n, kl, name in points), quote=True)
    return (
        f'<h2>KL against bytes</h2><figure><svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="max-width:{_WIDTH}px;font-size:13px;fill:var(--ink)">'
        f'<path d="M{_MARGIN} 20V{y:.1f}H{_WIDTH}" fill="none" stroke="var(--soft)"/>'
        f'<text x="{_MARGIN - 6}" y="34" text-anchor="end">{top:.3g}</text>'
        f'<text x="{_MARGIN - 6}" y="{y:.1f}" text-anchor="end">0</text>'
        f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{size(most)}</text>'
        f'<text x="{_MARGIN}" y="14" text-anchor="start">KL [nat per token]</text>'
        f'<text x="{_WIDTH}" y="{y + 32:.1f}" text-anchor="end">bytes of all weights</text>{"".join(marks)}</svg>'
        "<figcaption>Both axes start at zero; lower and further left is better.</figcaption></figure>"
    )


def _prompts(found: Mapping[str, Any], texts: Sequence[str]) -> str:
    worst = sorted(enumerate(found["kl_by_prompt"]), key=lambda pair: -pair[1])[:_N_PROMPTS]
    rows = [[" ".join(texts[i].split())[:_N_CHARACTERS], str(i), f"{kl:.5f}"] for i, kl in worst]
    title = f"Prompts that changed most: {found['name']}"
    caption = f"The {len(rows)} prompts with the largest KL, from their start; the mean of all is {found['kl']:.5f}."
    return html_table(title, caption, ("prompt", "number", "KL [nat per token]"), rows, 1)
