"""The how-to pages: every command of theirs on the embedded model is run; `test_docs` reads the others."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from loopq.cli import main

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("*.md"))
#: What a command makes may be read by the next ones of its page.
MADE = {"Q", "B", "F", "P", "C", "D", "S"}


def commands(page: Path) -> list[list[str]]:
    """Commands that name the embedded model or what an earlier one made of it."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
            if "huginn_small" in words or MADE & set(words):
                found.append(words)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands(page)
    for words in commands(page):
        assert main(words) == 0, words
