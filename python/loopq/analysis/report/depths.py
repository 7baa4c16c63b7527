"""A model at several depths on one page, with KL, agreement and speed by the number of loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.analysis.report.markup import Cell, number, page_html, section, table
from loopq.analysis.report.style import Picture, label, line, panels, styled, whole_numbers
from loopq.storage.files import write_text


def write_depths(
    out: str | Path, model: str, rows: Sequence[Mapping[str, Any]], text: Mapping[str, Any]
) -> Path:
    """Write the page. `text` is `TokenSet.describe` of the prompts.

    Rows are `Measurement.summary` of each set of weights at each depth, with "n_steps" and "tokens_per_second".
    """
    intro = (
        f"{text['n_prompts']} prompts, {text['n_tokens']} tokens of {text['source']}. KL and agreement: to full "
        "precision at the same depth. Tokens per second: one text on the machine that measured."
    )
    notes = dict.fromkeys(f" {row['name']}: {row['warning']}." for row in rows if "warning" in row)
    hidden = rows[0]["output"] == "hidden"
    heads = ["loops", "weights", "squared relative error" if hidden else "KL [nats per token]"]
    heads += ["cosine" if hidden else "same token [%]", "tokens per second"]
    cells: list[list[Cell | str]] = [
        [
            number(row["n_steps"], "d"), Cell(row["name"]), number(row["kl"], ".5f"),
            number(row["agreement"] * (1 if hidden else 100), ".5f" if hidden else ".2f"),
            number(row["tokens_per_second"], ".1f"),
        ]
        for row in rows
    ]  # fmt: skip
    picture = _picture(rows, heads[2:])
    body = section("depths", picture.title, picture.svg() + table("Depths", heads, cells))
    return write_text(
        Path(out),
        page_html(f"{model} by number of loops", intro + "".join(notes), body, {"rows": list(rows)}),
    )


def _picture(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Picture:
    with styled("depths"):
        figure, many = panels(3)
        names_of = list(dict.fromkeys(row["name"] for row in rows))
        for axes, key, name in zip(many, ("kl", "agreement", "tokens_per_second"), names, strict=True):
            scale = 100.0 if "%" in name else 1.0
            for index, weights in enumerate(names_of):
                points = [row for row in rows if row["name"] == weights and row[key] is not None]
                if points and (index or key == "tokens_per_second"):
                    depths, values = zip(*((row["n_steps"], scale * row[key]) for row in points), strict=True)
                    line(axes, index, depths, values, weights)
            whole_numbers(axes.xaxis)
            label(axes, "loops [number]", name if "[" in name else f"{name} [number]")
        (many[-1] if many[-1].lines else many[0]).legend()
    return Picture(
        "depths", "By the number of loops", "Left: lower is better; others: higher is better.", figure
    )
