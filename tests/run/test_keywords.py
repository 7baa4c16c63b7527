"""Types of keywords: written from the settings, and read by a type checker."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from typing import get_type_hints

from loopq.calibrate.prompts import CalibrationTake, Take
from loopq.models.from_python import Opening
from loopq.run import keywords
from loopq.run.config import flat_names
from loopq.run.gate import Gate
from loopq.runtime.generate import Generation
from loopq.settings.execution import Execution
from tests.support.interpreters import ROOT

SNIPPET = """
import loopq

loopq.quantize("m", bits=3, exclude="*adapter*", n_prompts=2, threads=1, preset="best", levels="uneven")
loopq.quantize("m", bit=3)
loopq.quantize("m", bits="3")
loopq.solve("d", n_prompts=3)
loopq.evaluate("m", "q", n_prompts=3, bits=3)
loopq.diagnose("m", only="ranks", group_size=3)
loopq.export("q", "o", "gguf", engine="vllm", raged="split")
"""


def test_the_module_is_what_the_settings_declare():
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert script["KEYWORDS"].read_text("utf-8") == script["keywords"](), "run python docs/settings.py"


def test_keywords_are_those_that_the_functions_take():
    how, prompts = set(Execution().flat()), set(CalibrationTake().flat())
    run = flat_names() | {"preset"}
    for kind, taken in (
        (keywords.QuantizeKeywords, run | how | prompts | set(Gate().flat()) | set(Opening().flat())),
        (keywords.SolveKeywords, run | how),
        (keywords.MeasureKeywords, set(Take().flat()) | how | set(Opening().flat())),
        (keywords.GenerateKeywords, set(Generation().flat()) | set(Opening().flat())),
    ):
        assert set(get_type_hints(kind)) == taken


def test_a_type_checker_flags_wrong_keywords(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = ["-m", "mypy", "--config-file", "pyproject.toml", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [sys.executable, *command, tmp_path / "snippet.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    flagged = re.findall(
        r"snippet\.py:(\d+): error: (?:Unexpected keyword argument|Argument) \"(\w+)\"", done.stdout
    )
    assert flagged == [
        ("5", "bit"), ("6", "bits"), ("7", "n_prompts"), ("8", "bits"), ("9", "group_size"), ("10", "raged")
    ]  # fmt: skip
