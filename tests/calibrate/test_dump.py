"""Dumps: damage is named, steps that are not there are refused, parts are merged exactly."""

from __future__ import annotations

import numpy as np
import pytest

import loopq
from loopq.calibrate.collect import collect_hessians, collect_rows
from loopq.calibrate.dump import Dump, merge
from loopq.errors import ConfigError, DumpError
from loopq.systems.declare import parameter_of
from tests.support.checkpoints import reseal
from tests.support.runs import SETTINGS, damaged, digest, job_of


@pytest.fixture
def dump(loaded, tokens, tmp_path):
    out = tmp_path / "dump"
    collect_rows(job_of(loaded, tokens), out, shard_batches=1)
    return out


def test_damaged_dumps_are_refused(dump, tmp_path):
    def truncate(copy):
        path = copy / "shards" / "00000.safetensors"
        path.write_bytes(path.read_bytes()[:-7])

    def flip(copy):
        path = copy / "shards" / "00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def manifest(**changes):
        def change(copy):
            reseal(copy / "manifest.json", lambda data: data.update(changes))

        return change

    for change, match in [
        (truncate, r"00000\.safetensors: truncated or altered"),
        (flip, r"00001\.safetensors: altered: its SHA-256"),
        (lambda c: (c / "model" / "model.safetensors").unlink(), r"model\.safetensors: missing"),
        (lambda c: (c / "manifest.json").write_text("{"), "not valid JSON"),
        (manifest(version=9), "version 9; this loopq reads version 2"),
        (manifest(format="other"), "its format is not"),
        (manifest(kind="pictures"), "kind: 'pictures'"),
        (manifest(rows={}), "is not in the manifest"),
        (manifest(rows_dtype="F16"), r"the manifest says F16"),
        (manifest(parameters=[{"name": "x"}]), r"parameters\[0\]"),
    ]:
        with pytest.raises(DumpError, match=match):
            Dump(damaged(dump, change, tmp_path / "copy"))


def test_a_step_the_dump_lacks_is_an_error(loaded, tokens, tmp_path, dump):
    with pytest.raises(ConfigError, match="steps '3'"):
        loopq.solve(dump, steps="3", **SETTINGS)
    collect_hessians(job_of(loaded, tokens), tmp_path / "late", steps=[1, 2])
    with pytest.raises(DumpError, match=r"only the sum over steps \[1, 2\]"):
        loopq.solve(tmp_path / "late", steps="first", **SETTINGS)


def test_parts_collected_apart_merge_to_the_same_bits_in_any_order(loaded, tokens, tmp_path, monkeypatch):
    parts = []
    for i, (first, last) in enumerate([(0, 4), (4, 7), (7, 10)]):
        collect_hessians(job_of(loaded, tokens.take(first, last)), tmp_path / f"part{i}")
        parts.append(tmp_path / f"part{i}")
    merge(parts, tmp_path / "abc")
    merge([parts[2], parts[0], parts[1]], tmp_path / "cab")
    assert digest(tmp_path / "abc") == digest(tmp_path / "cab")
    merge(parts[:2], tmp_path / "ab")
    merge([tmp_path / "ab", parts[2]], tmp_path / "ab-c")
    for input_group in Dump(tmp_path / "abc").manifest.rows:
        a, b = (Dump(tmp_path / n).accumulator(input_group, [0, 1, 2]).matrix() for n in ("abc", "ab-c"))
        np.testing.assert_array_equal(a, b)
    with pytest.raises(DumpError, match="count twice"):
        merge([parts[0], parts[0]], tmp_path / "twice")
    with monkeypatch.context() as broken:
        broken.setattr(
            "loopq.calibrate.dump.shutil.copyfile", lambda *a: (_ for _ in ()).throw(OSError(28, "No space"))
        )
        with pytest.raises(DumpError, match=r"full: cannot be written \(No space\)"):
            merge(parts, tmp_path / "full")
    assert not [p for p in tmp_path.iterdir() if "full" in p.name]
    with pytest.raises(DumpError, match="count twice"):
        merge([tmp_path / "ab", parts[1]], tmp_path / "twice")


def test_a_merge_that_the_disk_cannot_hold_leaves_nothing(loaded, tokens, tmp_path, monkeypatch):
    parts = [tmp_path / "a", tmp_path / "b"]
    for seed, part in enumerate(parts):
        collect_hessians(job_of(loaded, tokens, seed=seed), part)
    monkeypatch.setattr("loopq.storage.files.free_bytes", lambda path: 1000)
    with pytest.raises(DumpError, match=r"sum: takes .* MiB, the disk has 0\.0"):
        merge(parts, tmp_path / "sum")
    assert not list(tmp_path.glob("*sum*"))
    monkeypatch.undo()
    assert merge(parts, tmp_path / "sum").kind == "hessian"


def test_weights_of_a_dump_are_those_of_the_model(loaded, tokens, dump):
    opened = Dump(dump)
    weights = opened.weights()
    for p in loaded.system.shared_parameters(3):
        np.testing.assert_array_equal(
            weights.oriented(p), parameter_of(loaded.system.model, p).detach().numpy()
        )
    assert len(weights.tensors) == len(list(weights.tensors))
    with pytest.raises(DumpError, match="no tensor 'nothing'"):
        weights.raw("nothing")
    assert opened.side_files() == loaded.side_files
