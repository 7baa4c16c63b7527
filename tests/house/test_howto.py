"""The how-to pages and the example of engines: their commands run on the embedded model or on earlier results of the
page; `test_docs` reads the others.

`python -m tests.house.test_howto PAGE` runs a page's commands and writes anew what they print.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from loopq.cli import main
from tests.support.interop.environments import interpreter

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "howto").glob("*.md")), ROOT / "examples" / "engines.md"]
#: Later commands of a page may read the results of earlier ones.
MADE = {"Q", "B", "F", "P", "C", "D", "S", "M", "G"}
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: What needs an environment of its own.
ENGINES = {"gptqmodel": "gptq", "forecast.py": "fracast"}


def commands(page: Path) -> list[list[str]]:
    """Commands that name the embedded model or what an earlier one made, and those that run a file of the page."""
    return [words for words, _ in shown(page)]


def shown(page: Path) -> list[tuple[list[str], list[str]]]:
    """Commands with the lines that the page shows below each."""
    runs: list[tuple[list[str], list[str]]] = []
    for block in BLOCK.findall(page.read_text("utf-8")):
        for line in block.splitlines():
            if not line.startswith("$ "):
                runs[-1][1].append(line)
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[0] == "python" or "huginn_small" in words or MADE & {w.split("/")[0] for w in words}:
                runs.append((words, []))
    return runs


def run(words: list[str]) -> str:
    """Run a command of a page and return what a program of its own prints."""
    program, *rest = words
    if program != "python" and "--register" not in rest:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main(rest) == 0, rest
        return said.getvalue()
    # A process of its own: what a file registers would stay.
    kind = next((ENGINES[word] for word in rest if word in ENGINES), "")
    python = interpreter(kind) if kind else sys.executable
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    module = [] if program == "python" else ["-m", "loopq"]
    done = subprocess.run(
        [python, *module, *rest],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    return done.stdout


def main_of_page(page: Path) -> None:
    """Run the commands of a page and write what those print that are programs of their own."""
    text = page.read_text("utf-8")

    def again(block: re.Match[str]) -> str:
        lines = []
        for line in block[1].splitlines():
            if line.startswith("$ "):
                said = run(shlex.split(line.removeprefix("$ "), comments=True))
                tokens = "tokens.py" in line or line.startswith("$ loopq run Q/")
                lines += [line, *said.splitlines()[-1:]] if tokens else [line]
        return "```console\n" + "\n".join(lines) + "\n```"

    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        write_files(page)
        done = BLOCK.sub(again, text)
    page.write_text(done, "utf-8")


def write_files(page: Path) -> None:
    """Write the examples that begin with the name of a file."""
    pattern = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for name, text in pattern.findall(page.read_text("utf-8")):
        Path(name).write_text(text, "utf-8")


def cases() -> list[Any]:
    """Commands of each page. A page with folders of models has a case for each model, which makes the folders."""
    found = []
    for page in PAGES:
        by_model: dict[str, list[Any]] = {}
        for words, lines in shown(page):
            model = next((word.split("/")[1].split(".")[0] for word in words if word[1:2] == "/"), "")
            by_model.setdefault("making" if "tests.support.shown" in words else model, []).append(
                (words, lines)
            )
        making = by_model.pop("making", [])
        if not making:
            by_model = {"": [each for group in by_model.values() for each in group]}
        for model, own in by_model.items():
            name = f"{page.stem}-{model}" if model else page.stem
            found.append(pytest.param(page, [*making, *own] if model else own, id=name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("page", "told"), cases())
def test_commands_run(page, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(page)
    assert told
    for words, lines in told:
        with contextlib.suppress(pytest.skip.Exception):
            said = run(words).splitlines()[-1:]
            if "llama.cpp" in words:
                # It rounds activations, so that a later token may be the other one of two.
                said, lines = ([line.split()[0] for line in each] for each in (said, lines))
            assert not lines or said == lines, words


if __name__ == "__main__":
    main_of_page(Path(sys.argv[1]).absolute())
