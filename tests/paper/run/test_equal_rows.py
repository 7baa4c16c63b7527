"""Equal rows: each position is used at one step only."""

from __future__ import annotations

import numpy as np
import pytest

import loopq
from loopq.calibrate.data import from_ids
from loopq.errors import ConfigError
from loopq.models.from_python import wrap
from loopq.paper.run.equal_rows import EqualRows
from loopq.run.config import QuantConfig
from tests.support.accelerator import DEVICE, accelerator
from tests.support.experts import routed_loop
from tests.support.runs import run_of


def test_equal_rows_spread_the_rows_of_one_step(tiny, tokens):
    config = QuantConfig.of(group_size=16, metric="inputs", rank_threshold=None)
    run = run_of(tiny, tokens, config, batch_size=5)
    expected = run.solve_from(EqualRows(run.job))
    result = loopq.quantize(tiny, tokens, config, inputs="equal-rows", batch_size=5, threads=1)
    plain = loopq.quantize(tiny, tokens, config, batch_size=5, threads=1)
    assert all(result.layers[n].same_as(x) for n, x in expected.items())
    assert any(not result.layers[n].same_as(x) for n, x in plain.layers.items())
    n_positions = sum(s.size for s in tokens.sequences)
    assert {x.report["n_rows"] for x in result.layers.values() if x.report["steps"]} == {n_positions}
    with pytest.raises(ConfigError, match="they go with metric 'inputs'"):
        loopq.quantize(tiny, tokens, config, inputs="equal-rows", method="gptq-cd", metric="loop")


def test_equal_rows_uses_each_position_once(tiny, tokens):
    config = QuantConfig.of(method="gptq-cd", bits=3, group_size=16, rank_threshold=None)
    run = run_of(tiny, tokens, config, batch_size=5, seed=1)
    rows = EqualRows(run.job)
    n_positions = sum(s.size for s in tokens.sequences)
    for p in run.job.selection.distinct_inputs:
        acc = rows.accumulator(p.name, [0, 1, 2])
        counts = [acc.n_rows(t) for t in range(3)]
        assert sum(counts) == n_positions
        assert max(counts) - min(counts) <= 1
    layers = run.solve_from(rows)
    assert all(layer.report["n_rows"] == n_positions for layer in layers.values() if layer.report["steps"])
    steps = rows.step_of(np.arange(30), 3)
    assert all(sorted(steps[i : i + 3]) == [0, 1, 2] for i in range(0, 30, 3))
    other = EqualRows(run_of(tiny, tokens, config, batch_size=5, seed=2).job)
    assert (steps != other.step_of(np.arange(30), 3)).any()


def test_rows_are_summed_where_the_model_is(tiny, tokens):
    run = run_of(tiny, tokens, QuantConfig.of(method="gptq", group_size=16), seed=1)
    name = run.job.selection.distinct_inputs[0].name
    expected = EqualRows(run.job).accumulator(name, [0, 1, 2]).matrix()
    with accelerator():
        tiny.model.to(DEVICE)
        sums = EqualRows(run.job).accumulator(name, [0, 1, 2]).matrix()
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_one_row_for_each_position_cannot_be_had_of_experts():
    loaded = wrap(routed_loop(closed=(2,)))
    tokens = from_ids(np.random.default_rng(0).integers(0, 60, (7, 12)), "ids")
    with pytest.raises(ConfigError, match="experts have other tokens at each step"):
        loopq.quantize(loaded, tokens, method="gptq", inputs="equal-rows", bits=3, group_size=8)


def test_its_one_run_is_counted(tiny, tokens):
    assert run_of(tiny, tokens, QuantConfig.of(inputs="equal-rows")).estimate().n_passes == 1
