"""Paired inputs of two rollouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopq.calibrate import pairs
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.pairs import collect_pairs
from loopq.errors import CalibrationError
from loopq.models.replace import Replaced
from tests.support.accelerator import DEVICE, accelerator
from tests.support.runs import job_of


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
    monkeypatch.setattr("loopq.calibrate.pairs.Sums.add", lambda *args, **kwargs: 1 // 0)
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
    reference = paired.reference()
    assert list(reference.steps) == [0, 1, 2]
    assert reference.n_rows(1) == rows["x"].n_rows(1)
    np.testing.assert_array_equal(reference.matrix([1]), moments.reference)
    np.testing.assert_array_equal(reference.diagonal([1]), np.diag(moments.reference))
    assert reference.trace(1) == pytest.approx(np.trace(moments.reference))
    both = paired.of([0, 1], [0.5, 1.0])
    halves = 0.5 * paired.of([0]).quantized + moments.quantized
    np.testing.assert_allclose(both.quantized, halves, rtol=1e-12)


def test_pairs_are_summed_where_the_model_is(tiny, job):
    first, last = job.selection.distinct_inputs[0].name, job.selection.distinct_inputs[-1].name
    other = tiny.model.get_parameter(first).detach().numpy() * np.float32(1.1)
    expected = collect_pairs(job, [last], {first: other})[last].of([0, 1, 2])
    with accelerator():
        tiny.model.to(DEVICE)
        found = collect_pairs(job, [last], {first: other})[last].of([0, 1, 2])
    for a, b in ((found.quantized, expected.quantized), (found.cross, expected.cross)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(expected.quantized).max())


def test_rollouts_of_unlike_sizes_are_refused(job, monkeypatch):
    input_group = job.selection.distinct_inputs[0].name
    n_rows = iter((4, 3))

    def rollout(job, to, only, progress):
        to(input_group, 0, torch.ones(next(n_rows), 2))
        yield 1

    monkeypatch.setattr(pairs, "run_rollouts", rollout)
    with pytest.raises(CalibrationError, match=r"step 0: \(3, 2\) rows in the quantized rollout, \(4, 2\)"):
        collect_pairs(job, [input_group], {})
