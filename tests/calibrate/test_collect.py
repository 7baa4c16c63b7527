"""Collections: sums and rows of every step, resumed after a kill, refused where the disk is too small."""

from __future__ import annotations

import os

import pytest

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.dump import Dump
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.errors import ConfigError, DumpError, LoopqError
from loopq.formats import native as store
from loopq.storage.lock import locked
from tests.support.kills import Kill, Killer
from tests.support.runs import SETTINGS, digest, job_of


def test_what_several_processes_cannot_divide_is_refused(command, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    export = ("export", tmp_path, "--out", tmp_path / "out", "--format", "gptq")
    code, _, text = command(*export)
    assert code == 2
    assert "RANK= are set: start the processes with torchrun, or unset both" in text
    monkeypatch.setenv("RANK", "1")
    code, _, text = command(*export)
    assert code == 2
    assert "2 processes were started (WORLD_SIZE), and this command is for one" in text
    code, _, text = command("collect", "huginn_small", "--out", tmp_path / "out")
    assert code == 2
    assert "2 processes can divide sums, not rows: add --hessian" in text


def test_a_killed_collection_of_rows_is_resumed(loaded, tokens, tmp_path):
    job = job_of(loaded, tokens, batch_size=2)
    collect_rows(job, tmp_path / "whole", shard_batches=2)
    killed = job_of(loaded, tokens, batch_size=2, progress=Killer(5))
    with pytest.raises(Kill):
        collect_rows(killed, tmp_path / "parts", shard_batches=2)
    with pytest.raises(DumpError, match=r"no manifest\.json"):
        Dump(tmp_path / "parts")
    with pytest.raises(DumpError, match=r"another collection \(the calibration changed since\)"):
        collect_rows(job_of(loaded, tokens.take(0, 4), batch_size=2), tmp_path / "parts", shard_batches=2)
    collect_rows(job, tmp_path / "parts", shard_batches=2)
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_rows_in_bfloat16_and_float16(loaded, tokens, tmp_path, checkpoint_folder):
    plain = store.read(checkpoint_folder).layers
    for kind in ("bfloat16", "float16"):
        collect_rows(job_of(loaded, tokens), tmp_path / kind, rows_dtype=kind)
        result = loopq.solve(tmp_path / kind, **SETTINGS)
        same = [(layer.codes == plain[name].codes).mean() for name, layer in result.layers.items()]
        assert min(same) > 0.95
    with pytest.raises(ConfigError, match="rows_dtype"):
        collect_rows(job_of(loaded, tokens), tmp_path / "x", rows_dtype="int8")
    with pytest.raises(ConfigError, match="shard_batches must be at least 1"):
        collect_rows(job_of(loaded, tokens), tmp_path / "x", shard_batches=0)


def test_a_full_disk_leaves_nothing_behind(loaded, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.calibrate.collect.free_bytes", lambda path: 1000)
    with pytest.raises(DumpError, match="the disk has"):
        collect_rows(job_of(loaded, tokens), tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


def test_a_dump_that_was_begun_needs_only_the_room_that_is_left(loaded, tokens, tmp_path, monkeypatch):
    job, out = job_of(loaded, tokens, batch_size=2), tmp_path / "dump"
    monkeypatch.setattr("loopq.calibrate.collect.free_bytes", lambda path: 1000)
    with pytest.raises(DumpError, match="keep Hessians instead"):
        collect_rows(job, out, shard_batches=1)
    assert not out.exists()
    monkeypatch.undo()
    with pytest.raises(Kill):
        collect_rows(job_of(loaded, tokens, batch_size=2, progress=Killer(8)), out, shard_batches=1)
    done = sum(p.stat().st_size for p in (out / "shards").glob("*.safetensors"))
    need = done * 10 // 8
    monkeypatch.setattr("loopq.calibrate.collect.free_bytes", lambda path: need - done + 8192)
    assert collect_rows(job, out, shard_batches=1).kind == "rows"


@pytest.mark.parametrize("collect", [collect_rows, collect_hessians])
def test_a_second_collection_is_told_who_the_first_is(loaded, tokens, tmp_path, collect):
    out = tmp_path / "new" / "dump"
    job = job_of(loaded, tokens)
    with locked(out), pytest.raises(LoopqError, match=f"process {os.getpid()} on .* is writing it"):
        collect(job, out)
    assert not list(out.parent.iterdir())
    collect(job, out)
    assert [path.name for path in out.parent.iterdir()] == ["dump"]
