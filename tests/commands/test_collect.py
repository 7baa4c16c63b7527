"""`loopq collect`, `merge` and `solve`: the way over dumps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from loopq.cli import parser
from loopq.commands import collect as module
from loopq.errors import ConfigError
from loopq.run.ranks import Ranks


@pytest.mark.parametrize(
    ("args", "code", "match"),
    [
        (["solve", "{tmp}", "--out", "{tmp}/o"], 1, "not a dump"),
        (["solve", "{tmp}/none", "--out", "{tmp}/o"], 1, "none: no such folder"),
        (["solve", "{tmp}", "--out", "{tmp}/o", "--metric", "loop"], 2, "unknown argument --metric"),
        (["merge", "{tmp}", "--out", "{tmp}/o"], 2, "at least two parts"),
        (["collect", "nowhere", "--out", "{tmp}/o", "--shard-batches", "0"], 2, "must be between 1 and 1048576; got 0"),
        (["collect", "nowhere", "--out", "{tmp}/o", "--set", "steps=x"], 2, "goes with --hessian"),
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
    code, _, said = command(*args, killed)
    assert code == 0, said
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


def parsed(*args):
    return parser().parse_args(["collect", "m", "--out", "o", *args])


def test_rows_of_all_steps_are_kept_unless_asked_otherwise():
    args = parsed()
    assert (args.hessian, args.per_step, args.rows_dtype, args.metric) == (False, False, None, "inputs")
    assert not any(hasattr(args, name) for name in ("steps", "metric_prompts", "metric_draws"))
    assert (args.shard_batches, args.rank_timeout, args.include, args.exclude) == (8, 600, [], [])


@pytest.mark.parametrize(
    ("flag", "most"),
    [
        ("--set=metric_prompts", 1 << 31),
        ("--set=metric_draws", 1 << 16),
        ("--shard-batches", 1 << 20),
        ("--rank-timeout", 1 << 20),
    ],
)
def test_counts_have_bounds(flag, most, capsys):
    option, _, name = flag.partition("=")
    name = name or flag[2:].replace("-", "_")
    for good in (1, most):
        assert getattr(parsed(f"{flag}={good}"), name) == good
    for bad in (0, most + 1):
        with pytest.raises(SystemExit):
            parsed(f"{flag}={bad}")
        assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "ranks", "match"),
    [
        ((), Ranks(0, 2), "2 processes can divide sums, not rows"),
        (("--metric", "loop"), None, "--metric loop goes with --hessian"),
        (("--hessian", "--set=metric_prompts=3"), None, "go with --metric loop"),
        (("--hessian", "--set=metric_draws=3"), None, "go with --metric loop"),
        (("--hessian", "--rows-dtype", "float16"), None, "goes without --hessian"),
        (("--per-step",), None, "--per-step goes with --hessian"),
        (("--set", "steps=0"), None, "--set steps goes with --hessian"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(args, ranks, match):
    with pytest.raises(ConfigError, match=match):
        module._check(parsed(*args), ranks)


@pytest.mark.parametrize(
    "args",
    [(), ("--rows-dtype", "float16"), ("--hessian", "--set", "steps=0", "--per-step"),
     ("--hessian", "--metric", "loop", "--set", "metric_draws=2", "--set", "metric_prompts=3")],
)  # fmt: skip
def test_options_that_go_together_are_taken(args):
    module._check(parsed(*args), Ranks(0, 2) if "--hessian" in args else None)


def test_what_was_asked_for_reaches_the_collection(saved_model, tmp_path, command, monkeypatch):
    asked = []

    def collect(job, out, **more):
        asked.append((job, out, more))
        return "manifest"

    monkeypatch.setattr(module, "collect_rows", collect)
    monkeypatch.setattr(module, "collect_hessians", collect)
    monkeypatch.setattr(module, "print_dump", lambda manifest: print(f"content of {manifest}"))
    monkeypatch.setattr(module, "loop_metrics", lambda job, *asked: ("gradients", *asked))
    common = ("collect", saved_model, "--n-prompts", 2, "--seq-len", 16, "--out", tmp_path / "d")
    code, out, _ = command(
        *common, "--rows-dtype", "bfloat16", "--shard-batches", 3, "--seed", 5, "--n-steps", 2
    )
    assert (code, out) == (0, f"content of manifest\nwritten to {tmp_path / 'd'}\n")
    job, where, more = asked.pop()
    assert (where, more) == (tmp_path / "d", {"rows_dtype": "bfloat16", "shard_batches": 3})
    assert (len(job.tokens.sequences), job.execution.seed, job.selection.parameters[0].invocations) == (
        2,
        5,
        2,
    )
    assert command(*common, "--hessian", "--n-steps", 3, "--exclude", "*adapter*")[0] == 0
    assert asked[-1][2] == {"steps": None, "per_step": False, "gradients": None}
    assert "transformer.adapter.weight" not in {p.name for p in asked.pop()[0].selection.observed}
    assert command(*common, "--hessian", "--n-steps", 3, "--set", "steps=1:", "--per-step")[0] == 0
    more = asked.pop()[2]
    assert (tuple(more["steps"]), more["per_step"]) == ((1, 2), True)
    for draws, n in (((), module._DRAWS), (("--set", "metric_draws=6"), 6)):
        assert command(*common, "--hessian", "--metric", "loop", "--set", "metric_prompts=1", *draws)[0] == 0
        assert asked.pop()[2]["gradients"] == ("gradients", 1, n, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_several_processes_prints(saved_model, tmp_path, command, monkeypatch, rank):
    asked = []
    monkeypatch.setattr(
        module.in_ranks, "collect_hessians", lambda ranks, dump: asked.append(ranks) or "manifest"
    )
    monkeypatch.setattr(module, "print_dump", lambda manifest: print("content"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    common = ("--n-prompts", 2, "--seq-len", 16, "--out", tmp_path / "d", "--rank-timeout", 7)
    code, out, _ = command("collect", saved_model, "--hessian", *common)
    assert (code, "content" in out) == (0, rank == 0)
    assert asked == [Ranks(rank, 2, 7.0)]
