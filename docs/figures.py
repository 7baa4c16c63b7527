"""Figures of `docs/why.md`: `python docs/figures.py` diagnoses the embedded model, writes them to `docs/_static`."""

from __future__ import annotations

from pathlib import Path

import loopq
from loopq.analysis.report.sections import all_figures


def write() -> None:
    """Draw the loop with its exposed layer, and the ranks by step, as on the page of a diagnosis."""
    found = loopq.diagnose("huginn_small", only=["ranks", "ablation"], n_prompts=8, seq_len=64)
    for picture in all_figures(found):
        if picture.name in ("loop", "ranks"):
            # On a dark page they keep the white ground that their colours were chosen for.
            text = picture.svg().replace("<svg ", '<svg style="background:#fff" ', 1)
            (Path(__file__).parent / "_static" / f"{picture.name}.svg").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    write()
