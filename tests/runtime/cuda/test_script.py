"""The GPU script, every line of every section, with the host emulation in the GPU's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import benches.gpu.__main__ as bench
from benches.gpu import decode, phases
from benches.kernels import sections
from tests.support.cuda.emulation import compiler

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).resolve().parents[3]
SHELL = ROOT / "benches" / "gpu.sh"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every section of the kernels, run dry into one record."""
    path = tmp_path_factory.mktemp("record") / "gpu.json"
    for section in sections.SECTIONS:
        assert bench.main([section, str(path), "--dry-run", "--seconds", "60"]) == 0
    return path


@pytest.mark.slow
def test_every_section_runs_and_every_target_gets_its_row(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(record.read_text())
    assert set(data["sections"]) == set(sections.SECTIONS)
    assert bench.main(["note", str(record), "--note", "memcheck", "clean"]) == 0
    rows = bench.rows(json.loads(record.read_text()))
    others = {"check", "decode", *phases.RUNS}
    assert {row[0] for row in rows if row[2] == "open"} == others
    verdicts = {row[0]: row[2] for row in rows}
    # Results that do not depend on a clock or on Huginn's size hold in emulation too.
    exact = [v for k, v in verdicts.items() if "comparisons" in k or "edges" in k or "same bits" in k]
    assert len(exact) == 2
    assert set(exact) == {"met"}
    for layer, target in (("mlp.fc", "70%"), ("adapter", "60%"), ("attn.proj", "50%")):
        assert any(layer in k and target in k and "16 tokens" in k for k in verdicts)
    assert sum("2.7x cuBLAS" in k for k in verdicts) == 3
    capsys.readouterr()
    bench.main(["rows", str(record)])
    out = capsys.readouterr().out
    assert out.startswith("A DRY RUN")
    assert "| compute-sanitizer memcheck clean | clean | met |" in out


@pytest.mark.slow
def test_a_missing_section_leaves_its_rows_open(record: Path) -> None:
    data = json.loads(record.read_text())
    del data["sections"]["products"]
    assert ("products", "not in the record", "open") in bench.rows(data)


def test_a_record_keeps_the_rows_of_what_is_no_longer_measured() -> None:
    old = json.loads((ROOT / "benches/record/kernels-h200-2026-11-26.json").read_text())
    targets = [row[0] for row in bench.rows(old)]
    assert sum("comparisons, bulk" in target for target in targets) == 1
    assert sum("tokens, bulk: 2.7x" in target for target in targets) == 3


@pytest.mark.slow
def test_wrong_results_do_not_meet_their_target(record: Path) -> None:
    data = json.loads(record.read_text())
    data["sections"]["exact"]["cp_async"]["all_repeatable"] = False
    assert [row[2] for row in bench.rows(data) if "cp_async: float32" in row[0]] == ["NOT MET"]


@pytest.mark.slow
def test_another_machine_does_not_join_a_record(record: Path) -> None:
    with pytest.raises(SystemExit, match="give another file"):
        bench.add_section(record, {"device": "NVIDIA H100"}, "exact", {})


@pytest.mark.slow
def test_the_shell_file_runs_and_counts_failures(tmp_path: Path) -> None:
    """Two sections and an unknown name, the short way; the sanitizer does not run."""
    compiler()
    env = {**os.environ, "PYTHON": sys.executable, "TOTAL_SECONDS": "200"}
    shell = str(SHELL)
    done = subprocess.run(
        ["bash", shell, "--dry-run", str(tmp_path), "models", "no_such_section"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "no_such_section FAILED" in done.stdout
    assert "| exact | not in the record | open |" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu.json", "gpu.log", "gpu.md"]
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


def test_the_shell_file_names_sections_that_exist() -> None:
    shell = SHELL.read_text()
    named = shell.split("${*:-")[1].split("}")[0].split()
    for group in ("phases", "kernels"):
        named += shell.split(f'{group}="')[1].split('"')[0].split()
    assert set(named) <= {*bench.SECTIONS, "sanitizer"}


def test_phases_are_timed_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert bench.main(["smol", str(path), "--dry-run"]) == 0
    stages = json.loads(path.read_text())["sections"]["smol"]["stages"]
    assert {"collect", "metric", "solve", "evaluate"} <= set(stages)
    assert all(stage["done"] == stage["of"] > 0 for stage in stages.values())
    assert bench.main(["rows", str(path)]) == 0
    assert "solve" in capsys.readouterr().out


def test_ways_of_decoding_a_model_are_timed() -> None:
    timed: dict[str, dict[str, Any]] = {"no_graph": {}, "tokens_per_s": {}}
    kept: list[int] = []
    with decode._device(dry=True) as device:
        decode._decode(phases.ouro(True), device, True, 0.0, timed, lambda: kept.append(1))
    assert timed["no_graph"] == {"bfloat16, graph": "", "int4, graph": ""}
    assert all(timed["tokens_per_s"][way] > 0 for way in decode.WAYS)
    assert len(kept) == 1 + len(decode.WAYS)


@pytest.mark.slow
def test_every_way_of_decoding_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert bench.main(["decode", str(path), "--dry-run"]) == 0
    data = json.loads(path.read_text())["sections"]["decode"]
    assert set(data["models"]) == set(decode.UNTIL) == {"huginn-3.5b", "ouro-1.4b"}
    for timed in data["models"].values():
        assert timed["no_graph"] == {"bfloat16, graph": "", "int4, graph": ""}
        assert all(timed["tokens_per_s"][way] > 0 for way in decode.WAYS)
    assert set(data["products"]) == set(data["models"])
    rows = decode.rows(data)
    assert {row[2] for row in rows} == {"met", "reported"}
    assert sum("Marlin: vllm" in row[1] for row in rows) == 2
    data["models"]["ouro-1.4b"]["no_graph"] = {"int4, graph": "a recorded step cannot be used"}
    failed = [row for row in decode.rows({**data, "worst_float32": 1e-3}) if row[2] == "NOT MET"]
    assert [row[0] for row in failed] == [
        "int4 kernel against float64, 1 token: 3e-6",
        "ouro-1.4b: a step of int4, graph as one CUDA graph",
    ]
    del data["products"]
    assert len(decode.rows(data)) == len(rows) - 5


def test_a_run_whose_time_is_over_tells_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert bench.main(["smol", str(path), "--dry-run", "--seconds", "0"]) == 0
    data = json.loads(path.read_text())["sections"]["smol"]
    assert "stopped_after" in data
    assert "kl" not in data
