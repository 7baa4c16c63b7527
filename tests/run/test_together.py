"""Work that several processes divide; whole runs of several processes are in tests/soak and test_result.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import loopq
from loopq.errors import ConfigError, LoopqError
from loopq.run import together
from loopq.run.config import QuantConfig


def test_a_rank_that_is_late_takes_what_the_others_wrote(tiny, tmp_path, monkeypatch):
    written = loopq.quantize(tiny, [[1, 2, 3, 4]] * 2, out=tmp_path / "Q", method="rtn", group_size=8)

    def late(job, dump):
        raise LoopqError(f"{dump}: cannot be written (No such file or directory)")

    monkeypatch.setattr(together, "collect_hessians", lambda ranks, job, dump, **asked: late(job, dump))
    monkeypatch.setattr(
        together.Needs, "of", lambda plan, job: SimpleNamespace(steps=(), per_step=False, gradients=None)
    )
    source = SimpleNamespace(key=lambda plan: "0" * 64, job=None)
    ranks = together.Ranks(1, 2)
    found = together.quantize(ranks, None, source, tmp_path / "Q")
    assert sorted(found.layers) == sorted(written.layers)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == ["Q"]
    with pytest.raises(LoopqError, match="cannot be written"):
        together.quantize(ranks, None, source, tmp_path / "other")


def test_ranks_refuse_what_needs_the_model_between_layers(tmp_path):
    with pytest.raises(ConfigError, match="inputs 'asymmetric' run the model between layers, which several"):
        together.refuse(QuantConfig.of(preset="best"), tmp_path / "Q", own_format=True)
    with pytest.raises(ConfigError, match="`export` it afterwards"):
        together.refuse(QuantConfig(), tmp_path / "Q", own_format=False)
    with pytest.raises(ConfigError, match="`export` it afterwards"):
        together.refuse(QuantConfig(), None, own_format=True)
    assert together.refuse(QuantConfig(), str(tmp_path / "Q"), own_format=True) == tmp_path / "Q"
