"""From solved layers to a checkpoint: from a model or from a dump of any kind, the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import native as store
from loopq.run import together
from loopq.storage import lock
from tests.support.marks import slow_unless
from tests.support.runs import SETTINGS, digest


def test_checkpoint_holds_what_was_solved(loaded, tokens, checkpoint_folder):
    result = loopq.quantize(loaded, tokens, batch_size=3, **SETTINGS)
    again = store.read(checkpoint_folder)
    assert list(result.layers) == [p.name for p in loaded.system.shared_parameters(3)]
    for name, layer in result.layers.items():
        assert layer.same_as(again.layers[name])
        assert again.layers[name].report == json.loads(json.dumps(layer.report))
    assert again.settings["n_steps"] == 3
    config = loopq.QuantConfig.from_json(again.settings["quantization"])
    assert config == loopq.QuantConfig.of(**SETTINGS)
    assert config.layer.calibration.steps == "all"


def worker(dump, out, *more):
    argv = [sys.executable, "-m", "loopq", "solve", dump, "--out", out, "--bits", "3", "--group-size", "20"]
    argv += ["--levels", "even"]
    return subprocess.Popen(
        [*map(str, argv), "--method", "gptq", "--set", "scale_search=max", *(more or ["--worker"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process):
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", slow_unless(lambda n: n == 2, [1, 2, 5]))
def test_workers_that_race_write_what_one_process_writes(dump, tmp_path, n_workers):
    loopq.solve(dump, out=tmp_path / "alone", threads=1, **SETTINGS)
    (tmp_path / "shared").mkdir()
    out = tmp_path / "shared" / "out"
    for said in map(finished, [worker(dump, out) for _ in range(n_workers)]):
        assert f"written to {out}" in said
    assert digest(out) == digest(tmp_path / "alone")
    # A late process finds the result; a process with a command for other settings gets an error.
    loopq.solve(dump, out=out, several=True, **SETTINGS)
    with pytest.raises(CheckpointError, match="holds a checkpoint of other settings"):
        loopq.solve(dump, out=out, several=True, **SETTINGS | {"bits": 4})
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_what_a_killed_worker_had_claimed_is_solved_by_another(dump, tmp_path):
    loopq.solve(dump, out=tmp_path / "alone", threads=1, **SETTINGS)
    out = tmp_path / "out"
    first = worker(dump, out)
    # Waiting for a claim without an owner would take as long as for another machine's: two minutes.
    while not any(claim.stat().st_size for claim in (tmp_path / ".out.work").glob("layers/*/*.claim.0")):
        assert first.poll() is None
        time.sleep(0.001)
    first.kill()
    first.communicate()
    finished(worker(dump, out))
    assert digest(out) == digest(tmp_path / "alone")
    assert not (tmp_path / ".out.work").exists()


@pytest.mark.slow
def test_shards_wait_for_nobody_and_the_last_one_writes(dump, tmp_path):
    loopq.solve(dump, out=tmp_path / "alone", threads=1, **SETTINGS)
    out = tmp_path / "out"
    assert "the one that ends last writes" in finished(worker(dump, out, "--shard", "2/2"))
    assert loopq.solve(dump, out=out, shard=(1, 2), **SETTINGS) is not None
    assert digest(out) == digest(tmp_path / "alone")
    # A shard that is missing is solved by the command without shards.
    assert loopq.solve(dump, out=tmp_path / "other", shard=(1, 3), **SETTINGS) is None
    loopq.solve(dump, out=tmp_path / "other", **SETTINGS)
    assert digest(tmp_path / "other") == digest(out)
    assert not (tmp_path / ".other.work").exists()
    with pytest.raises(ConfigError, match="shard must be K of N, K from 1 to N; got 3 of 2"):
        loopq.solve(dump, out=out, shard=(3, 2), **SETTINGS)
    assert "'2': give K/N, as in 3/20" in worker(dump, out, "--shard", "2").communicate()[0]


def test_a_worker_waits_until_another_machines_heart_stops(dump, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 0.1)
    monkeypatch.setattr(together, "POLL", 0.02)
    loopq.solve(dump, out=tmp_path / "alone", threads=1, **SETTINGS)
    out = tmp_path / "out"
    assert loopq.solve(dump, out=out, shard=(2, 2), **SETTINGS) is None
    (work,) = (tmp_path / ".out.work" / "layers").iterdir()
    (work / ".claim.0").write_text('{"host": "elsewhere", "pid": 1}')
    loopq.solve(dump, out=out, several=True, **SETTINGS)
    assert digest(out) == digest(tmp_path / "alone")


def test_a_worker_that_overslept_saves_nothing(dump, tmp_path, monkeypatch):
    monkeypatch.setattr(lock.Claims, "holds", lambda self, name: False)
    monkeypatch.setattr(together, "POLL", 0.0)
    left = iter([False, False, True])
    run = together._share
    monkeypatch.setattr(together, "_share", lambda *a: run(*a[:4], lambda: next(left)))
    assert loopq.solve(dump, out=tmp_path / "out", several=True, **SETTINGS) is None
    assert not list((tmp_path / ".out.work").rglob("*.safetensors"))
