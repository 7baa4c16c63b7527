"""Dumps collected apart and added."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loopq.calibrate.collect import collect_rows
from loopq.calibrate.dump import Dump
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.calibrate.merge import merge
from loopq.calibrate.select import select
from loopq.errors import ConfigError, DumpError
from tests.support.checkpoints import reseal
from tests.support.runs import digest, job_of


def test_a_merge_takes_two_parts_or_more(tmp_path):
    with pytest.raises(ConfigError, match="at least two parts"):
        merge([tmp_path], tmp_path / "out")


def test_separate_parts_merge_to_the_same_bits_in_any_order(loaded, tokens, tmp_path, monkeypatch):
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
            "loopq.calibrate.merge.shutil.copyfile", lambda *a: (_ for _ in ()).throw(OSError(28, "No space"))
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
    monkeypatch.setattr("loopq.storage.folders.free_bytes", lambda path: 1000)
    with pytest.raises(DumpError, match=r"sum: takes .* MiB, the disk has 0\.0"):
        merge(parts, tmp_path / "sum")
    assert not list(tmp_path.glob("*sum*"))
    monkeypatch.undo()
    assert merge(parts, tmp_path / "sum").kind == "hessian"


def test_parts_that_do_not_go_together_are_refused(loaded, tokens, tmp_path):
    collect_hessians(job_of(loaded, tokens.take(0, 2)), tmp_path / "sums")
    collect_rows(job_of(loaded, tokens.take(2, 4)), tmp_path / "rows")
    deeper = dataclasses.replace(
        job_of(loaded, tokens.take(2, 4)), selection=select(loaded.system, tokens, n_steps=2)
    )
    collect_hessians(deeper, tmp_path / "deeper")
    with pytest.raises(DumpError, match="a dump of rows; only Hessian dumps are merged"):
        merge([tmp_path / "sums", tmp_path / "rows"], tmp_path / "out")
    with pytest.raises(DumpError, match="its n_steps differ from those of"):
        merge([tmp_path / "sums", tmp_path / "deeper"], tmp_path / "out")
    with pytest.raises(DumpError, match="no Hessian for layer absent"):
        Dump(tmp_path / "sums").accumulator("absent", [0])


def test_parts_with_other_steps_are_refused(loaded, tokens, tmp_path):
    for name, first in (("all", 0), ("some", 2)):
        collect_hessians(job_of(loaded, tokens.take(first, first + 2)), tmp_path / name)
    reseal(tmp_path / "some" / "manifest.json", lambda d: next(iter(d["rows"].values())).popitem())
    with pytest.raises(DumpError, match="its steps differ from those of"):
        merge([tmp_path / "all", tmp_path / "some"], tmp_path / "out")
