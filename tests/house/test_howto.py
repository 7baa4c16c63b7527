"""The how-to pages: their commands run on the embedded model or on earlier results of the page; `test_docs`
reads the others."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from loopq.cli import main

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("*.md"))
#: Later commands of a page may read the results of earlier ones.
MADE = {"Q", "B", "F", "P", "C", "D", "S", "M"}


def commands(page: Path) -> list[list[str]]:
    """Commands that name the embedded model or what an earlier one made, and those that run a file of the page."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[0] == "python" or "huginn_small" in words or MADE & set(words):
                found.append(words)
    return found


def write_files(page: Path) -> None:
    """Write the examples that begin with the name of a file."""
    pattern = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for name, text in pattern.findall(page.read_text("utf-8")):
        Path(name).write_text(text, "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(page)
    assert commands(page)
    for program, *words in commands(page):
        if program == "python" or "--register" in words:
            # In a separate process: registrations of a file would stay.
            module = [] if program == "python" else ["-m", "loopq"]
            subprocess.run([sys.executable, *module, *words], check=True)
        else:
            assert main(words) == 0, words
