"""Pages as notebooks: `python docs/notebooks.py` writes `docs/notebooks/NAME.ipynb` out of `docs/NAME.md`.

Every command after a `$` in a console block and every Python block becomes a cell, without the output that the page
shows; all else is text. Blocks of other kinds, such as `sh`, stay in the text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: Pages that have a notebook, and the heading at which it ends (None: the whole page).
PAGES = {"tutorial": None, "diagnose": "## All of it"}
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


def notebook(name: str) -> dict[str, Any]:
    """Return the notebook of a page, in nbformat 4.5."""
    text = (FOLDER / f"{name}.md").read_text("utf-8")
    end = PAGES[name]
    if end is not None:
        text = text[: text.index(end)]
    # Pages are in the folder above the notebooks.
    pieces = _BLOCK.split(_LINK.sub(r"](../\1)", text))
    cells = [("markdown", pieces[0])]
    for kind, code, after in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        cells += [("code", line) for line in _code(kind, code)] + [("markdown", after)]
    return {
        "cells": [_cell(i, kind, source.strip()) for i, (kind, source) in enumerate(cells) if source.strip()],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _code(kind: str, code: str) -> list[str]:
    """Return the cells of a block: one for each command, run by the shell, or the Python as it stands."""
    if kind == "python":
        return [code]
    return [f"!{line[2:]}" for line in code.splitlines() if line.startswith("$ ")]


def _cell(i: int, kind: str, source: str) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    lines = source.splitlines(keepends=True)
    return {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, **code, "source": lines}


def write() -> None:
    """Write every notebook."""
    out = FOLDER / "notebooks"
    out.mkdir(exist_ok=True)
    for name in PAGES:
        text = json.dumps(notebook(name), indent=1, ensure_ascii=False) + "\n"
        (out / f"{name}.ipynb").write_text(text, "utf-8")


if __name__ == "__main__":
    write()
