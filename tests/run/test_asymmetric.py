"""Asymmetric calibration: layer by layer on the inputs that each will get."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import loopq
from loopq.calibrate.data import from_ids
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.hooks import counted_calls
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.errors import CalibrationError, ConfigError
from loopq.models.replace import Replaced
from loopq.models.systems.generic import Generic
from loopq.run import asymmetric
from loopq.run.asymmetric import AsymmetricInputs, ReferenceSums, collect_pairs
from loopq.settings.execution import Execution
from loopq.systems.declare import parameter_of
from tests.support.accelerator import DEVICE, accelerator
from tests.support.asymmetric import asked, prepared
from tests.support.kills import Kill, Killer, counting
from tests.support.odd_loop import Settling
from tests.support.runs import SETTINGS, digest, job_of, tensors_of


def open_loop(run):
    return run.solve_from(run.all_steps(), run.config.changed(inputs="open"))


def test_first_layer_is_the_open_loops_and_output_errors_fall(tiny, tokens):
    run = prepared(tiny, tokens)
    tasks, plain = run.tasks, open_loop(run)
    solved = {alpha: run.solve(AsymmetricInputs(alpha=alpha)) for alpha in (0.0, 1.0)}
    first = tasks[0].name
    for layers in solved.values():
        assert list(layers) == [t.name for t in tasks]
        np.testing.assert_array_equal(layers[first].codes, plain[first].codes)
    assert any(not solved[1.0][n].same_as(plain[n]) for n in plain)
    assert all(solved[0.0][n].report["target_shift"] == 0 for n in plain)
    assert all(
        solved[1.0][t.name].report["target_shift"] > 0 for t in tasks if t.input_group != tasks[0].input_group
    )

    def output_error(layers):
        """Squared error of every layer's output against full precision, inputs of the quantized rollout."""
        total = 0.0
        for input_group in run.job.selection.distinct_inputs:
            m = collect_pairs(run.job, [input_group.name], tensors_of(layers))[input_group.name].of([0, 1, 2])
            for t in tasks:
                if t.input_group == input_group.name:
                    w = parameter_of(tiny.system.model, t.parameter).detach().numpy().astype(np.float64)
                    d = layers[t.name].dequantize() - w
                    total += np.trace(d @ m.quantized @ d.T) - 2 * np.trace(d @ m.cross.T @ w.T)
                    total += np.trace(w @ (m.reference - m.cross - m.cross.T - m.quantized) @ w.T)
        return total

    assert output_error(solved[1.0]) < output_error(plain)


@pytest.mark.slow
def test_same_bytes_again_and_at_two_threads(tiny, tokens):
    one = prepared(tiny, tokens).solve(AsymmetricInputs(sweeps=2))
    two = prepared(tiny, tokens, threads=2).solve(AsymmetricInputs(sweeps=2))
    assert all(one[n].same_as(two[n]) for n in one)
    assert all(layer.report["sweep"] == 1 for layer in one.values())


def test_settings_that_cannot_be(tiny, tokens):
    for bad in ({"inputs": "both"}, {"alpha": 1.5}, {"alpha": 2.0}, {"sweeps": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(**({"inputs": "asymmetric"} | bad))


@pytest.mark.slow
def test_a_killed_run_is_resumed(loaded, tokens, tmp_path, monkeypatch):
    asked = {"inputs": "asymmetric", "sweeps": 2, "batch_size": 3, "threads": 1, **SETTINGS}
    loopq.quantize(loaded, tokens, out=tmp_path / "whole", **asked)
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "killed", progress=Killer(11), **asked)
    seen = []
    monkeypatch.setattr(asymmetric, "collect_pairs", counting(asymmetric.collect_pairs, seen))
    loopq.quantize(loaded, tokens, out=tmp_path / "killed", **asked)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    # Nine input groups, twice; twelve layers were solved when the kill came.
    assert len(seen) == 6
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "other", progress=Killer(11), **asked)
    seen.clear()
    loopq.quantize(loaded, tokens, out=tmp_path / "other", **(asked | {"alpha": 0.5}))
    assert len(seen) == 18


@pytest.fixture
def job(tiny, tokens):
    return job_of(tiny, tokens, batch_size=5, threads=1)


def test_pairs_without_other_weights_are_the_plain_hessian(job):
    input_group = job.selection.distinct_inputs[0].name
    moments = collect_pairs(job, [input_group], {})[input_group].of([0, 1, 2])
    np.testing.assert_array_equal(moments.reference, moments.quantized)
    np.testing.assert_array_equal(moments.cross, np.zeros_like(moments.cross))
    sums = HessianSet(job, {input_group: [0, 1, 2]})
    sums.run_pass([input_group])
    np.testing.assert_allclose(
        moments.reference, sums.accumulators[input_group].matrix(), rtol=1e-6, atol=1e-3
    )


def test_hooks_are_gone_after_an_error_that_is_kept(tiny, job, monkeypatch):
    input_group = job.selection.distinct_inputs[0].name
    monkeypatch.setattr("loopq.run.asymmetric.Sums.add", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError) as kept:
        collect_pairs(job, [input_group], {})
    assert kept.tb is not None
    assert not [m for m in tiny.model.modules() if m._forward_pre_hooks]


def test_pairs_hold_the_two_rollouts(tiny, job):
    first, last = job.selection.distinct_inputs[0].name, job.selection.distinct_inputs[-1].name
    weight = tiny.system.model.get_parameter(first).detach().numpy()
    other = (weight * 1.1).astype(np.float32)
    paired = collect_pairs(job, [last], {first: other})[last]
    moments = paired.of([1])
    rows = {}
    for key, values in (("x", weight), ("q", other)):
        with Replaced(tiny.system, {first: values}) as other:
            sums = HessianSet(dataclasses.replace(job, system=other), {last: [1]})
            sums.run_pass([last])
        rows[key] = sums.accumulators[last]
    x, q = rows["x"].matrix(), rows["q"].matrix()
    np.testing.assert_allclose(moments.reference, x, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(moments.quantized, q, rtol=1e-5, atol=1e-3)
    assert np.abs(moments.cross).max() > 0
    np.testing.assert_array_equal(tiny.system.model.get_parameter(first).detach().numpy(), weight)
    reference = ReferenceSums(paired.sums, paired.dim)
    assert list(reference.steps) == [0, 1, 2]
    assert reference.n_rows(1) == rows["x"].n_rows(1)
    np.testing.assert_array_equal(reference.matrix([1]), moments.reference)
    np.testing.assert_array_equal(reference.diagonal([1]), np.diag(moments.reference))
    both = paired.of([0, 1], [0.5, 1.0])
    halves = 0.5 * paired.of([0]).quantized + moments.quantized
    np.testing.assert_allclose(both.quantized, halves, rtol=1e-12)


def test_pairs_are_summed_where_the_model_is(tiny, job):
    first, last = job.selection.distinct_inputs[0].name, job.selection.distinct_inputs[-1].name
    other = tiny.model.get_parameter(first).detach().numpy() * np.float32(1.1)
    expected = collect_pairs(job, [last], {first: other})[last].of([0, 1, 2])
    with accelerator():
        tiny.model.to(DEVICE)
        moments = collect_pairs(job, [last], {first: other})[last].of([0, 1, 2])
    for a, b in ((moments.quantized, expected.quantized), (moments.cross, expected.cross)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(expected.quantized).max())


def test_rollouts_of_unlike_sizes_are_refused(job, monkeypatch):
    input_group = job.selection.distinct_inputs[0].name
    n_rows = iter((4, 3))

    def rollout(job, to, only, progress):
        to(input_group, 0, torch.ones(next(n_rows), 2))
        yield 1

    monkeypatch.setattr(asymmetric, "run_rollouts", rollout)
    with pytest.raises(CalibrationError, match=r"step 0: \(3, 2\) rows in the quantized rollout, \(4, 2\)"):
        collect_pairs(job, [input_group], {})


def test_a_loop_that_ends_by_itself_is_paired_where_both_rollouts_have_its_steps():
    system = Generic(Settling())
    ids = from_ids([list(range(i, i + 8)) for i in range(0, 48, 8)])
    job = Collection(system, ids, select(system, ids), Execution(batch_size=1, threads=1))
    weight = system.model.core.weight.detach().numpy()
    with counted_calls(system, system.n_steps) as calls:
        for batch in ids.batches(1):
            system.rollout(batch, system.n_steps)
    same = collect_pairs(job, ["core.weight"], {"core.weight": weight})["core.weight"]
    assert sum(same.sums.n_rows(t) for t in same.sums.steps) == 8 * calls["core.weight"]
    for factor in (1.5, 0.2):
        # More steps than in full precision, and fewer.
        with pytest.raises(CalibrationError, match="work depends on its values"):
            collect_pairs(job, ["core.weight"], {"core.weight": factor * weight})
