"""The demo's comparison as one self-contained HTML page, drawn without matplotlib."""

from __future__ import annotations

import html
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from loopq.checkpoint.files import write_text
from loopq.report.style import short_names
from loopq.table import size


def write_comparison(result: Mapping[str, Any], out: str | Path) -> Path:
    """Write the result of the demo as an HTML page with a bar for every KL.

    Parameters
    ----------
    result : mapping
        What `loopq.demo.run` returns.
    out : path
        HTML file.

    Returns
    -------
    Path
        The file.
    """
    first = result["grids"][0]
    template = (resources.files("loopq.report") / "comparison.html").read_text("utf-8")
    reference, n_draws = result["reference"], len(result["metric_seeds"])
    text = string.Template(template).substitute(
        model=html.escape(result["model"]),
        steps=result["n_steps"],
        n_calibration=f"{result['calibration']['n_tokens']:,}",
        n_evaluation=f"{result['evaluation']['n_tokens']:,}",
        n_seeds=len(result["seeds"]),
        grids="\n".join(map(_grid, result["grids"])),
        reference=f"{reference['bits_per_byte']:.4f} bits per byte, {size(reference['n_bytes'])}",
        draws="one draw of the loop metric's labels"
        if n_draws == 1
        else f"means over {n_draws} draws of the loop metric's labels",
        last=f"{first['variants'][-1]['name']}, INT{first['bits']} g{first['group_size']}",
        layers=_layers(result["layers"]),
    )
    return write_text(out, text)


def _grid(grid: Mapping[str, Any]) -> str:
    """The table of one grid; its bars have one scale, from zero."""
    most = max(v["kl"] for v in grid["variants"])
    rows = "\n".join(
        f"<tr{' class=ours' if v['name'].startswith('loopq') else ''}><th scope=row>{html.escape(v['name'])}</th>"
        f"<td class=number>{v['kl']:.5f}</td><td class=plot>{_bar(v['kl'] / most)}</td>"
        f"<td class=number>{100 * v['agreement']:.2f} %</td><td class=number>{v['bits_per_byte']:.4f}</td>"
        f"<td class=number>{size(v['n_bytes'])}</td></tr>"
        for v in grid["variants"]
    )
    heads = (
        "<th scope=col>weights</th><th scope=colgroup colspan=2>KL to full precision [nat per token]</th>"
        + "".join(
            f"<th scope=col class=number>{head}</th>" for head in ("top-1 agreement", "bits/byte", "bytes")
        )
    )
    title = f"INT{grid['bits']}, groups of {grid['group_size']}"
    return (
        f'<h2>{title}</h2>\n<div class=scroll tabindex=0 role=region aria-label="{title}"><table>'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _layers(reports: Sequence[Mapping[str, Any]]) -> str:
    """One row for each weight: its error, and that of rounding."""
    short = short_names([r["layer"] for r in reports])
    most = max(1.0, *(report["proxy"] / report["proxy_rtn"] for report in reports))
    return "\n".join(
        f"<tr><th scope=row><code>{html.escape(short[r['layer']])}</code></th>"
        f"<td>{' x '.join(map(str, r['shape']))}</td>"
        f"<td class=number>{100 * r['proxy_rtn'] / r['proxy_total']:.2f}</td>"
        f"<td class=number>{100 * r['proxy'] / r['proxy_total']:.2f}</td>"
        f"<td class=plot>{_bar(r['proxy'] / r['proxy_rtn'] / most)}</td><td class=number>{size(r['n_bytes'])}</td></tr>"
        for r in reports
    )


def _bar(share: float) -> str:
    return f'<div class=bar style="width:{100 * share:.1f}%"></div>'
