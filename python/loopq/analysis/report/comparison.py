"""The demo's comparison as one self-contained HTML page, drawn without matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopq.analysis.report.alternatives import comparison
from loopq.analysis.report.markup import page_html, paragraph, section
from loopq.analysis.report.weights import quantized, solved
from loopq.storage.files import write_text
from loopq.terminal.table import size

_VARIANTS = (
    "GPTQ, one step: calibrated on the first call of each weight alone; trajectory: on all calls; llm-compressor's "
    "rules: that tool's default algorithm on the same sums, computed by loopq; loopq: what you get without any option."
)
_NEXT = """<pre><code>loopq check MODEL                     # a folder or a hub id: does loopq's adapter fit it?
loopq quantize MODEL --out Q          # INT4 in groups of 128; --bits 3 --group-size 32 as above
loopq evaluate MODEL Q --html q.html  # how far it is from full precision, and where the error is</code></pre>"""


def write_comparison(result: Mapping[str, Any], out: str | Path) -> Path:
    """Write the result of `loopq.commands.variants.run` as an HTML page with a bar for every KL."""
    first, reference, n_draws = result["grids"][0], result["reference"], len(result["metric_seeds"])
    draws = "one draw" if n_draws == 1 else f"means over {n_draws} draws"
    intro = (
        f"{result['n_steps']} recurrence steps. Calibrated on {result['calibration']['n_tokens']:,} tokens, measured "
        f"on {result['evaluation']['n_tokens']:,} held-out tokens, initial states of each: {len(result['seeds'])}, the "
        "same for every row. KL is the divergence from full precision: a shorter bar is better. All rows of a table "
        "have the same number of bytes."
    )
    note = (
        f"Full precision: {reference['bits_per_byte']:.4f} bits per byte, {size(reference['n_bytes'])}. {_VARIANTS} "
        f"Rows of loopq: {draws} of the loop metric's labels."
    )
    tables = [
        section(f"int{grid['bits']}", title, comparison(title, grid["variants"], ours="loopq"))
        for grid in result["grids"]
        for title in (f"INT{grid['bits']}, groups of {grid['group_size']}",)
    ]
    layers = {r["layer"]: {"name": r["layer"], **solved(r), **r} for r in result["layers"]}
    last = f"{first['variants'][-1]['name']}, INT{first['bits']}, groups of {first['group_size']}"
    body = [
        *tables,
        paragraph(note, "soft"),
        section("where", f"Error of each weight: {last}", quantized({last: layers})),
        section("next", "Your own model", _NEXT),
    ]
    return write_text(out, page_html(f"loopq demo: {result['model']}", intro, "\n".join(body)))
