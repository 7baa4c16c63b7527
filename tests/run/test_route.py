"""The one route: any inputs, and the same bytes from a model, a dump and ranks."""

from __future__ import annotations

import socket

import pytest

import loopq
from loopq.run.asymmetric import AsymmetricInputs
from loopq.run.config import QuantConfig
from loopq.run.ranks import Ranks
from loopq.run.route import carry_out
from tests.support.asymmetric import asked, prepared
from tests.support.runs import digest, run_of


def test_the_public_function_runs_layer_by_layer(tiny, tokens):
    result = loopq.quantize(tiny, tokens, asked(), inputs="asymmetric", batch_size=5, threads=1)
    expected = prepared(tiny, tokens).solve(AsymmetricInputs())
    assert all(result.layers[n].same_as(expected[n]) for n in expected)


@pytest.mark.parametrize("metric", ["loop", "inputs"])
def test_ranks_write_the_bytes_of_one_process(tiny, tokens, tmp_path, monkeypatch, metric):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    settings = {"group_size": 8, "metric": metric, "threads": 1, "batch_size": 2}
    loopq.quantize(tiny, tokens, out=tmp_path / "alone", **settings)
    loopq.quantize(tiny, tokens, out=tmp_path / "ranks", ranks=Ranks(0, 1), **settings)
    assert digest(tmp_path / "ranks") == digest(tmp_path / "alone")
    assert not (tmp_path / ".ranks.work").exists()


def test_a_result_is_written_once_and_has_the_facts_of_its_plan(tiny, tokens, monkeypatch):
    monkeypatch.setattr("loopq.run.outside.LEAST", 16)
    run = run_of(tiny, tokens, QuantConfig.of(method="rtn", group_size=8, outside=8))
    assert run.plan.outside
    written = []
    checkpoint = carry_out(run.source.prepare(run.plan), run.source, written.append)
    assert written == [checkpoint]
    assert list(checkpoint.layers)[: len(run.tasks)] == [t.name for t in run.tasks]
    assert set(checkpoint.layers) == {t.name for t in (*run.tasks, *run.plan.outside)}
    assert checkpoint.settings["n_steps"] == run.job.selection.n_steps
    assert "allocation" not in checkpoint.settings
