"""Dumps of Hessians, by one process and by several."""

from __future__ import annotations

import pytest

from loopq.calibrate.dump import Dump
from loopq.calibrate.hessian_dump import collect_hessians
from tests.support.runs import digest, in_ranks, job_of


def test_a_dump_in_several_passes_has_the_bytes_of_one(loaded, tokens, tmp_path):
    collect_hessians(job_of(loaded, tokens), tmp_path / "one", steps=[0, 2])
    widest = max(p.in_features for p in job_of(loaded, tokens).selection.distinct_inputs)
    limited = job_of(loaded, tokens, memory=8 * widest * (widest + 1))
    written = collect_hessians(limited, tmp_path / "several", steps=[0, 2])
    stored = {
        name: [f.sha256 for f in m.files if f.input_group == name] for m in (written,) for name in m.rows
    }
    one = Dump(tmp_path / "one").manifest
    assert stored == {name: [f.sha256 for f in one.files if f.input_group == name] for name in one.rows}
    assert all(list(steps) == [0, 2] for steps in written.rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_collection_of_several_processes_is_that_of_one(saved_model, tmp_path, command, world):
    asked = f"collect {saved_model} --hessian --n-prompts 24 --seq-len 50 --batch-size 1 --threads 1 --out"
    assert command(*asked.split(), tmp_path / "one")[0] == 0
    ended = in_ranks(f"{asked} {tmp_path / 'several'}", world)
    assert [code for code, _ in ended] == [0] * world, ended
    # One speaks for all.
    assert [f"written to {tmp_path / 'several'}" in text for _, text in ended] == [True] + [False] * (
        world - 1
    )
    assert digest(tmp_path / "several") == digest(tmp_path / "one")
