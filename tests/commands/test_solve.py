"""`loopq solve` where torch is not installed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from loopq.calibrate.collect import collect_rows
from loopq.commands.solve import _shard
from loopq.formats.convert import read_any
from tests.support.metric_dumps import collected
from tests.support.runs import job_of


def test_solving_needs_no_torch(loaded, tokens, tmp_path):
    dump = tmp_path / "dump"
    collect_rows(job_of(loaded, tokens), dump, shard_batches=1)
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'scipy', 'matplotlib', 'cupy'): sys.modules[name] = None\n"
        "from loopq.cli import main\n"
        f"sys.exit(main(['solve', {str(dump)!r}, '--out', {str(tmp_path / 'bare')!r}, '--bits', '3', "
        "'--group-size', '20']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "transformer.adapter.weight" in done.stdout
    assert (tmp_path / "bare" / "loopq.json").is_file()


def test_a_solve_with_the_loop_metric_needs_no_torch(loaded, tokens, tmp_path):
    dump = collected(loaded, tokens, tmp_path / "dump")
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'scipy', 'matplotlib', 'cupy'): sys.modules[name] = None\n"
        "from loopq.cli import main\n"
        f"sys.exit(main(['solve', {str(dump)!r}, '--out', {str(tmp_path / 'bare')!r}, '--group-size', '20']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_preset_applies_what_a_dump_can_have(loaded, tokens, tmp_path, command):
    dump = collected(loaded, tokens, tmp_path / "dump")

    def metrics(preset: str) -> set[str]:
        code, _, err = command(
            "solve", dump, "--out", tmp_path / preset, "--preset", preset, "--group-size", "20"
        )
        assert code == 0, err
        return {layer.report.get("metric") for layer in read_any(tmp_path / preset).layers.values()} - {None}

    assert "loop" in metrics("best")
    assert "loop" in metrics("small")
    assert "loop" not in metrics("fast")
    assert "loop" not in metrics("paper")


def test_a_shard_is_one_of_a_number():
    assert _shard("3/20") == (3, 20)
    assert _shard("999999/999999") == (999999, 999999)
    for bad in ("3", "3/", "/3", "a/b", "1000000/2", "3/20/1", "-1/2", " 1/2"):
        with pytest.raises(argparse.ArgumentTypeError, match="give K/N"):
            _shard(bad)
