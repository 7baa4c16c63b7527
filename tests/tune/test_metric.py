"""Loop metrics: against sums written out, and that the solver gains by them."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from loopq import zoo
from loopq.calibrate.data import windows
from loopq.config import LayerConfig, QuantConfig
from loopq.errors import ConfigError, SolveError, SystemContractError
from loopq.evaluate.compare import compare
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.arms import LOOP, collect_all_steps, solve_arm
from loopq.quantizers.base import Problem
from loopq.quantizers.metric import FLOOR, LoopMetric, inverse, ridged
from loopq.quantizers.solve import tasks_of
from loopq.rotation import parse_rotation
from loopq.systems.load import load_model
from loopq.threads import LARGE, OneThread
from loopq.tune import metric as module
from loopq.tune.metric import collect_metrics, draws, loop_metrics
from loopq.tune.unroll import unroll


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
    found = collect_metrics(tiny.system, few, tasks, hessian, n_draws=2)
    names = [t.parameter.name for t in tasks]
    gradients = list(draws(tiny.system, few, names, 3, 0, 2))
    assert len(gradients) == 6
    for task in tasks:
        name = task.parameter.name
        g = [x[name].double().numpy() for x in gradients]
        h = hessian(task)
        left = sum(x @ np.linalg.inv(h + 0.01 * np.diag(np.diag(h))) @ x.T for x in g)
        left = left + 0.1 * np.diag(np.diag(left))
        right = sum(x.T @ np.linalg.inv(left) @ x for x in g)
        np.testing.assert_allclose(found[name].left[0], left, rtol=1e-7, atol=1e-9 * left.max())
        np.testing.assert_allclose(found[name].right, right, rtol=1e-7, atol=1e-9 * right.max())
        assert found[name].n_gradients == 6
        combined = found[name].combined(h)
        ratio = np.median(np.diag(right) / np.diag(h))
        np.testing.assert_allclose(combined, h * ratio + right, rtol=1e-7, atol=1e-9 * right.max())


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


def test_threads_of_numpy_are_one_where_products_are_small_and_change_no_bit():
    def in_use():
        return {p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        threads = OneThread()
        with threads.where_small(LARGE - 1):
            assert in_use() == {1}
        with threads.where_small(LARGE):
            assert in_use() == {2}
        assert in_use() == {2}
    loaded = load_model("huginn_small")
    text = windows(zoo.calibration_text().decode(), loaded.encode, 64, 2, "text")
    sums, selection = collect_all_steps(loaded.system, text, threads=1)
    tasks, _ = tasks_of(selection.parameters, selection.leaders, QuantConfig(LayerConfig(**LOOP)))
    found = []
    for n in (1, 2):
        with threadpool_limits(n, user_api="blas"):
            found.append(loop_metrics(sums, loaded.system, text, tasks, n_draws=2))
    for name, one in found[0].items():
        for a, b in zip((*one.left, one.right), (*found[1][name].left, found[1][name].right), strict=True):
            np.testing.assert_array_equal(a, b)


def test_lowers_the_divergence(tiny, tokens):
    sums, selection, tasks, hessian = setup(tiny, tokens, bits=2)
    metrics = collect_metrics(tiny.system, tokens, tasks, hessian, n_draws=8)
    variants = {}
    for label, extra, given in (("inputs", {"metric": "inputs"}, None), ("loop", {}, metrics)):
        layers = solve_arm(sums, selection, tiny.system, asked(bits=2, **extra), 1, given)
        variants[label] = {n: x.in_model_orientation() for n, x in layers.items()}
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
    monkeypatch.setattr(type(tiny.system), "differentiable", lambda self: contextlib.nullcontext())
    with pytest.raises(SystemContractError, match="lets no gradient through"):
        collect_metrics(tiny.system, tokens, tasks, hessian)


def test_a_rollout_as_a_whole_has_the_gradients_of_its_steps(tiny, tokens, monkeypatch):
    """Systems without a single-step function are differentiated through their own forward."""
    few, name = tokens.take(0, 2), "transformer.adapter.weight"
    by_steps = [x[name] for x in draws(tiny.system, few, [name], 3, 0, 2)]
    monkeypatch.setattr(type(tiny.system), "has_steps", False)
    as_a_whole = [x[name] for x in draws(tiny.system, few, [name], 3, 0, 2)]
    for one, other in zip(by_steps, as_a_whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))
    batch = next(iter(few.batches(1, 0)))
    assert not tiny.system.rollout(batch, 3).requires_grad
    with pytest.raises(SystemContractError, match="cannot be cut off"):
        unroll(tiny.system, batch, 3, truncate=1)


def test_follows_scalings_and_rotations():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 6))
    h, r = x.T @ x, np.diag(rng.uniform(1, 2, size=6))
    by = np.array([1.0, 1.0, 1e6, 1.0, 1.0, 1e-3])
    turn = by * by[:, None]
    np.testing.assert_allclose(inverse(h * turn, 0.01) * turn, inverse(h, 0.01), rtol=1e-6)
    np.testing.assert_allclose(inverse(h, 0.01) @ ridged(h, 0.01), np.eye(6), atol=1e-10)
    plain = LoopMetric((np.eye(3),), r, 1).combined(h)
    np.testing.assert_allclose(
        LoopMetric((np.eye(3),), r * turn, 1).combined(h * turn), plain * turn, rtol=1e-9
    )
    dead = np.diag([1.0, 0.0])
    np.testing.assert_array_equal(ridged(dead, 0.5), np.diag([1.5, 0.5]))
    rotation = parse_rotation("hadamard:2", 2, 0)
    turned = LoopMetric((np.eye(3),), np.diag([1.0, 3.0]), 1).rotated(rotation)
    np.testing.assert_allclose(turned.right, [[2.0, -1.0], [-1.0, 2.0]], atol=1e-12)


@pytest.mark.parametrize("kappa", [4.0**7, 4.0**10])
def test_a_spike_that_changes_no_function_changes_no_code(tiny, tokens, kappa):
    """One hidden unit kappa times louder, its outgoing column smaller: every other code stays."""
    import torch

    from benches.zoo.planted import plant_kappa_spike

    ids = torch.from_numpy(np.stack(tokens.sequences))
    found = {}
    # From about 100 on the planted column rounds to nothing, and its group has the scale of the others.
    for value in (256.0, kappa):
        model, units = plant_kappa_spike(tiny.model, ids, value)
        planted = dataclasses.replace(tiny, model=model, system=type(tiny.system)(model))
        sums, selection, tasks, hessian = setup(planted, tokens, damping_kind="diagonal")
        metrics = collect_metrics(planted.system, tokens, tasks, hessian, n_draws=2)
        # A row 10^6 times larger has a scale beyond float16.
        config = asked(damping_kind="diagonal", scale_dtype="float32")
        found[value] = solve_arm(sums, selection, planted.system, config, 1, metrics)
    one, other = found.values()
    for name, layer in one.items():
        keep = np.ones(layer.codes.shape[1], dtype=bool)
        for mlp, unit in units.items():
            if name == f"{mlp}.proj.weight":
                keep[unit] = False
        changed = (layer.codes[:, keep] != other[name].codes[:, keep]).mean()
        assert changed == 0, (name, changed)


def test_rows_that_no_gradient_touches_do_not_take_the_errors_of_others(monkeypatch):
    """Four rows move with the others by 1e-4: second order lets them take any error, and is wrong so far away."""
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(8, 50))
    gradients = np.concatenate([seen, 1e-4 * rng.normal(size=(4, 8)) @ seen])
    left = ridged(gradients @ gradients.T, 0.1)
    weight = rng.normal(size=(12, 32)).astype(np.float32)
    x = rng.normal(size=(200, 32))
    metric = LoopMetric((left,), np.zeros((32, 32)), 200)

    def error(floor: float) -> float:
        monkeypatch.setattr("loopq.quantizers.metric.FLOOR", floor)
        problem = Problem("head", weight, x.T @ x, asked(group_size=32).layer, "out_in", 1, {}, metric=metric)
        found = QUANTIZERS.get("full")(problem).dequantize()
        return float(np.square(found[8:] - weight[8:]).sum() / np.square(weight[8:]).sum()) ** 0.5

    assert error(FLOOR) < 0.5 < 2.0 < error(0.0)
