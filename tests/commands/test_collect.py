"""`loopq collect`, `merge` and `solve`: the way over dumps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize(
    ("args", "code", "match"),
    [
        (["solve", "{tmp}", "--out", "{tmp}/o"], 1, "not a dump"),
        (["solve", "{tmp}/none", "--out", "{tmp}/o"], 1, "none: no such folder"),
        (["solve", "{tmp}", "--out", "{tmp}/o", "--metric", "loop"], 2, "unknown argument --metric"),
        (["merge", "{tmp}", "--out", "{tmp}/o"], 2, "at least two parts"),
        (["collect", "nowhere", "--out", "{tmp}/o", "--shard-batches", "0"], 2, "must be between 1 and 1048576; got 0"),
        (["collect", "nowhere", "--out", "{tmp}/o", "--steps", "x"], 2, "goes with --hessian"),
        (["collect", "nowhere", "--out", "{tmp}/o", "--per-step"], 2, "goes with --hessian"),
        (["collect", "nowhere", "--out", "{tmp}/o", "--hessian", "--rows-dtype", "float16"], 2, "without --hessian"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(tmp_path, command, args, code, match):
    got, out, err = command(*(a.format(tmp=tmp_path) for a in args))
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert match in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_real_kill_loses_nothing_that_was_written(saved_model, tmp_path, command):
    """SIGKILL during collection; the same command then ends with the bytes of an unbroken run."""
    args = (
        "collect",
        saved_model,
        "--n-prompts",
        40,
        "--seq-len",
        64,
        "--batch-size",
        1,
        "--shard-batches",
        2,
        "--out",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command(*args, whole)[0] == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "loopq", *map(str, (*args, killed))],
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=os.environ,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (killed / "shards" / "00003.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "manifest.json").exists()
    assert command(*args, killed)[0] == 0
    for path in whole.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (killed / path.relative_to(whole)).read_bytes()


@pytest.mark.parametrize("kind", [(), ("--hessian",)])
def test_several_depths_give_the_bytes_of_quantize(saved_model, tmp_path, command, kind):
    common = ("--n-prompts", 4, "--seq-len", 16)
    shape = ("--group-size", 32, "--method", "gptq")
    assert (
        command("collect", saved_model, *common, *kind, "--n-steps", "1,3", "--out", tmp_path / "dump")[0]
        == 0
    )
    assert command("solve", tmp_path / "dump", *shape, "--out", tmp_path / "solved")[0] == 0
    done = command("quantize", saved_model, *common, *shape, "--n-steps", "1,3", "--out", tmp_path / "whole")
    assert done[0] == 0, done
    for name in ("model.safetensors", "loopq.json", "report.jsonl"):
        assert (tmp_path / "solved" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
