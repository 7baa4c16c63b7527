"""The GPU script, every line of every section, with the host emulation in the GPU's place."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.emulation import compiler

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="NO C++ COMPILER: the GPU script is NOT tried here; install g++ or set CXX"
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benches" / "kernels" / "h200.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="not main")


@pytest.fixture(scope="module")
def record(script: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every section, run dry into one record."""
    path = tmp_path_factory.mktemp("record") / "kernels.json"
    for section in script["SECTIONS"]:
        assert script["main"]([section, str(path), "--dry-run", "--seconds", "60"]) == 0
    return path


def test_every_section_runs_and_every_target_gets_its_row(
    script: dict[str, Any], record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(record.read_text())
    assert set(data["sections"]) == set(script["SECTIONS"])
    assert script["main"](["note", str(record), "--note", "memcheck", "clean"]) == 0
    rows = script["rows"](json.loads(record.read_text()))
    assert not [row for row in rows if row[2] == "open"]
    verdicts = {row[0]: row[2] for row in rows}
    # What does not depend on a clock or on Huginn's size holds in emulation too.
    exact = [v for k, v in verdicts.items() if "comparisons" in k or "edges" in k or "same bits" in k]
    assert len(exact) == 4
    assert verdicts["graph replay equals eager, bit for bit"] == "met"
    assert set(exact) == {"met"}
    assert verdicts["544 products in a rollout"] == "NOT MET", "the tiny loop has another number"
    for layer, target in (("mlp.fc", "70%"), ("adapter", "60%"), ("attn.proj", "50%")):
        assert any(layer in k and target in k and "16 tokens" in k for k in verdicts)
    assert sum("2.7x cuBLAS" in k for k in verdicts) == 6
    assert sum(", 2.5x" in k for k in verdicts) == 18
    assert sum(", 4.0x" in k for k in verdicts) == 6
    capsys.readouterr()
    script["main"](["rows", str(record)])
    out = capsys.readouterr().out
    assert out.startswith("A DRY RUN")
    assert "| compute-sanitizer memcheck clean | clean | met |" in out


def test_a_missing_section_leaves_its_rows_open(script: dict[str, Any], record: Path) -> None:
    data = json.loads(record.read_text())
    del data["sections"]["products"]
    assert ("products", "not in the record", "open") in script["rows"](data)


def test_wrong_results_do_not_meet_their_target(script: dict[str, Any], record: Path) -> None:
    data = json.loads(record.read_text())
    data["sections"]["exact"]["bulk"]["all_repeatable"] = False
    data["sections"]["rollout_exact"]["overlap_same_bits"] = False
    verdicts = [
        row[2] for row in script["rows"](data) if "bulk: float32" in row[0] or "overlapping" in row[0]
    ]
    assert verdicts == ["NOT MET", "NOT MET"]


def test_another_machine_does_not_join_a_record(script: dict[str, Any], record: Path) -> None:
    with pytest.raises(SystemExit, match="give another file"):
        script["add_section"](record, {"device": "NVIDIA H100"}, "exact", {})


def test_the_shell_file_runs_and_counts_failures(tmp_path: Path) -> None:
    """Two sections and a name that is none, the short way; the sanitizer is not asked for."""
    env = {**os.environ, "PYTHON": sys.executable, "TOTAL_SECONDS": "200"}
    shell = str(ROOT / "benches" / "kernels" / "run_h200.sh")
    done = subprocess.run(
        ["bash", shell, "--dry-run", str(tmp_path), "models", "no_such_section"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "no_such_section FAILED" in done.stdout
    assert "| exact | not in the record | open |" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.json", "kernels.log", "kernels.md"]
    env["TOTAL_SECONDS"] = "5"
    done = subprocess.run(
        ["bash", shell, "--dry-run", str(tmp_path), "exact"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "exact: left out" in done.stdout


def test_the_shell_file_names_sections_that_exist(script: dict[str, Any]) -> None:
    shell = (ROOT / "benches" / "kernels" / "run_h200.sh").read_text()
    named = shell.split("sections=${*:-")[1].split("}")[0].split()
    assert {*named, "small"} == {*script["SECTIONS"], "sanitizer"}


def test_the_script_needs_no_compiled_extension(tmp_path: Path) -> None:
    """A GPU machine gets the sources and nothing built."""
    code = f"""
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "loopq._native":
            raise ImportError("not built here")
sys.meta_path.insert(0, Blocked())
script = runpy.run_path({str(SCRIPT)!r}, run_name="not main")
sys.exit(script["main"](["small", {str(tmp_path / "r.json")!r}, "--dry-run"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
