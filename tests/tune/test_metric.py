"""Loop metrics: against sums written out, and that the solver gains by them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loopq.config import LayerConfig, QuantConfig
from loopq.errors import ConfigError, SolveError, SystemContractError
from loopq.evaluate.compare import compare
from loopq.quantizers.arms import collect_all_steps, solve_arm
from loopq.quantizers.metric import LoopMetric, damped_inverse, ridged, unit
from loopq.quantizers.sequential import in_model_orientation
from loopq.quantizers.solve import tasks_of
from loopq.rotation import parse_rotation
from loopq.tune import metric as module
from loopq.tune.metric import collect_metrics, draws


def asked(**layer):
    return QuantConfig(
        LayerConfig(**({"method": "full", "bits": 3, "group_size": 16, "metric": "loop"} | layer)),
        rank_threshold=None,
    )


def setup(tiny, tokens, **layer):
    sums, selection = collect_all_steps(tiny.system, tokens, threads=1)
    tasks, _ = tasks_of(selection.parameters, selection.leaders, asked(**layer))

    def hessian(task):
        return np.asarray(sums.accumulator(task.leader, task.steps).matrix(list(task.steps)))

    return sums, selection, tasks, hessian


def test_is_one_round_of_the_alternation_written_out(tiny, tokens):
    _, _, tasks, hessian = setup(tiny, tokens)
    few = tokens.take(0, 3)
    found = collect_metrics(tiny.system, few, tasks, hessian, n_draws=2, threads=1)
    names = [t.parameter.name for t in tasks]
    gradients = list(draws(tiny.system, few, names, 3, 0, 2))
    assert len(gradients) == 6
    for task in tasks:
        name = task.parameter.name
        g = [x[name].double().numpy() for x in gradients]
        inverse = damped_inverse(hessian(task), 0.01, "mean")
        left = sum(x @ inverse @ x.T for x in g)
        left = left / np.diag(left).mean() + 0.1 * np.eye(len(left))
        right = sum(x.T @ np.linalg.inv(left) @ x for x in g)
        np.testing.assert_allclose(found[name].left[0], left, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(found[name].right, right / np.diag(right).mean(), rtol=1e-8, atol=1e-10)
        assert found[name].n_gradients == 6
        combined = found[name].combined(hessian(task))
        assert np.diag(combined).mean() == pytest.approx(2.0)


def test_gradients_computed_twice_are_those_that_are_kept(tiny, tokens, monkeypatch):
    _, _, tasks, hessian = setup(tiny, tokens)
    few = tokens.take(0, 2)
    kept = collect_metrics(tiny.system, few, tasks, hessian, n_draws=2)
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    again = collect_metrics(tiny.system, few, tasks, hessian, n_draws=2)
    monkeypatch.setattr(module, "BLOCK", 20)
    cut = collect_metrics(tiny.system, few, tasks, hessian, n_draws=2)
    for name, one in kept.items():
        np.testing.assert_array_equal(one.left[0], again[name].left[0])
        np.testing.assert_array_equal(one.right, again[name].right)
        rows = len(one.left[0])
        assert [len(a) for a in cut[name].left] == [min(20, rows - i) for i in range(0, rows, 20)]


def test_gradients_are_of_the_likelihood_and_average_to_nothing(tiny, tokens):
    """The expected score is zero: the mean over many draws is far below the size of one."""
    name = "transformer.adapter.weight"
    found = [x[name].numpy() for x in draws(tiny.system, tokens.take(0, 2), [name], 3, 0, 60)]
    mean = np.linalg.norm(np.mean(found, axis=0))
    size = np.mean([np.linalg.norm(x) for x in found])
    assert mean < 0.35 * size


def test_lowers_the_divergence(tiny, tokens):
    sums, selection, tasks, hessian = setup(tiny, tokens, bits=2)
    metrics = collect_metrics(tiny.system, tokens, tasks, hessian, n_draws=8)
    variants = {}
    for label, extra, given in (("inputs", {"metric": "inputs"}, None), ("loop", {}, metrics)):
        layers = solve_arm(sums, selection, tiny.system, asked(bits=2, **extra), 1, given)
        variants[label] = {n: in_model_orientation(x) for n, x in layers.items()}
        if given:
            for layer in layers.values():
                assert layer.report["metric"] == "loop"
                assert layer.report["metric_gradients"] == 80
                assert layer.report["coupled_settled"] <= layer.report["coupled_swept"]
    _, inputs, loop = compare(tiny.system, variants, tokens)
    assert loop.kl.mean() < 0.95 * inputs.kl.mean()


def test_refuses_what_has_no_gradients(tiny, tokens, monkeypatch):
    sums, selection, tasks, hessian = setup(tiny, tokens)
    with pytest.raises(SolveError, match="none were collected"):
        solve_arm(sums, selection, tiny.system, asked(), 1)
    with pytest.raises(ConfigError, match="goes with method 'full'"):
        tasks_of(selection.parameters, selection.leaders, asked(method="gptq"))
    with pytest.raises(ConfigError, match="metric_draws"):
        collect_metrics(tiny.system, tokens, tasks, hessian, n_draws=0)
    monkeypatch.setattr(type(tiny.system), "has_steps", False)
    with pytest.raises(SystemContractError, match="no single-step function"):
        collect_metrics(tiny.system, tokens, tasks, hessian)


def test_other_metrics_and_scales():
    h = np.diag([1.0, 3.0])
    assert np.diag(unit(h)).mean() == 1.0
    np.testing.assert_array_equal(unit(np.zeros((2, 2))), np.zeros((2, 2)))
    np.testing.assert_allclose(ridged(h, 0.5), np.diag([1.0, 2.0]))
    rotation = parse_rotation("hadamard:2", 2, 0)
    turned = LoopMetric((np.eye(3),), h, 1).rotated(rotation)
    np.testing.assert_allclose(turned.right, [[2.0, -1.0], [-1.0, 2.0]], atol=1e-12)
    assert dataclasses.replace(turned, n_gradients=2).left[0].shape == (3, 3)
