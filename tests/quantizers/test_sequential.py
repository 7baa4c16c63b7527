"""Asymmetric calibration, closed-loop recollection, equal rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from loopq.calibrate.asymmetric import collect_pairs
from loopq.calibrate.horizon import EqualRows
from loopq.config import LayerConfig, QuantConfig
from loopq.quantizers.arms import collect_all_steps, solve_arm
from loopq.quantizers.sequential import Sequential, recollected
from loopq.quantizers.solve import tasks_of

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.select import select
from loopq.errors import ConfigError


def setup(tiny, tokens, **layer):
    selection = select(tiny.system, tokens)
    job = Collection(tiny.system, tokens, selection, batch_size=5)
    config = QuantConfig(
        LayerConfig(**({"method": "full", "bits": 3, "group_size": 16} | layer)), rank_threshold=None
    )
    tasks, _ = tasks_of(selection.parameters, selection.leaders, config)
    return selection, job, config, tasks


def open_loop(tiny, tokens, config):
    sums, selection = collect_all_steps(tiny.system, tokens)
    return solve_arm(sums, selection, tiny.system, config, 1)


def test_pairs_without_other_weights_are_the_plain_hessian(tiny, tokens):
    selection, job, _, _ = setup(tiny, tokens)
    leader = selection.input_groups[0].name
    moments = collect_pairs(job, [leader], {}, threads=1)[leader].of([0, 1, 2])
    np.testing.assert_array_equal(moments.reference, moments.quantized)
    np.testing.assert_array_equal(moments.cross, np.zeros_like(moments.cross))
    sums = HessianSet(job, {leader: [0, 1, 2]})
    sums.run_pass([leader])
    np.testing.assert_allclose(moments.reference, sums.accumulators[leader].matrix(), rtol=1e-6, atol=1e-3)


def test_hooks_are_gone_after_an_error_that_is_kept(tiny, tokens, monkeypatch):
    selection, job, _, _ = setup(tiny, tokens)
    leader = selection.input_groups[0].name
    monkeypatch.setattr("loopq.calibrate.asymmetric.np.concatenate", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError) as kept:
        collect_pairs(job, [leader], {}, threads=1)
    assert kept.tb is not None
    assert not [m for m in tiny.model.modules() if m._forward_pre_hooks]


def test_pairs_hold_the_two_rollouts(tiny, tokens):
    selection, job, _, _ = setup(tiny, tokens)
    first, last = selection.input_groups[0].name, selection.input_groups[-1].name
    weight = tiny.system.model.get_parameter(first).detach().numpy()
    other = (weight * 1.1).astype(np.float32)
    moments = collect_pairs(job, [last], {first: other}, threads=1)[last].of([1])
    rows = {}
    for key, values in (("x", weight), ("q", other)):
        from loopq.systems.replace import replaced

        sums = HessianSet(job, {last: [1]})
        with replaced(tiny.system, {first: values}):
            sums.run_pass([last])
        rows[key] = sums.accumulators[last].matrix()
    np.testing.assert_allclose(moments.reference, rows["x"], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(moments.quantized, rows["q"], rtol=1e-5, atol=1e-3)
    assert np.abs(moments.cross).max() > 0
    np.testing.assert_array_equal(tiny.system.model.get_parameter(first).detach().numpy(), weight)


def test_first_layer_is_the_open_loop_one_and_the_sum_of_output_errors_falls(tiny, tokens):
    selection, job, config, tasks = setup(tiny, tokens)
    plain = open_loop(tiny, tokens, config)
    solved = {alpha: Sequential(job, alpha=alpha, threads=1).run(tasks) for alpha in (0.0, 1.0)}
    first = tasks[0].parameter.name
    for layers in solved.values():
        assert list(layers) == [t.parameter.name for t in tasks]
        np.testing.assert_array_equal(layers[first].codes, plain[first].codes)
    assert any(not solved[1.0][n].same_as(plain[n]) for n in plain)
    assert all(solved[0.0][n].report["target_shift"] == 0 for n in plain)
    assert all(
        solved[1.0][t.parameter.name].report["target_shift"] > 0 for t in tasks if t.leader != tasks[0].leader
    )

    def output_error(layers):
        """Squared error of every layer's output against full precision, inputs of the quantized rollout."""
        total = 0.0
        for leader in selection.input_groups:
            moments = collect_pairs(
                job, [leader.name], {n: x.in_model_orientation() for n, x in layers.items()}
            )
            m = moments[leader.name].of([0, 1, 2])
            for t in tasks:
                if t.leader == leader.name:
                    w = tiny.system.parameter(t.parameter).detach().numpy().astype(np.float64)
                    d = layers[t.parameter.name].dequantize() - w
                    total += np.trace(d @ m.quantized @ d.T) - 2 * np.trace(d @ m.cross.T @ w.T)
                    total += np.trace(w @ (m.reference - m.cross - m.cross.T - m.quantized) @ w.T)
        return total

    assert output_error(solved[1.0]) < output_error(plain)


def test_same_bytes_again_and_at_two_threads(tiny, tokens):
    _, job, _, tasks = setup(tiny, tokens)
    one = Sequential(job, sweeps=2, threads=1).run(tasks)
    two = Sequential(job, sweeps=2, threads=2).run(tasks)
    assert all(one[n].same_as(two[n]) for n in one)
    assert all(layer.report["sweep"] == 1 for layer in one.values())


def test_settings_that_cannot_be(tiny, tokens):
    _, job, _, tasks = setup(tiny, tokens, step_weights="validated")
    with pytest.raises(ConfigError, match="alpha"):
        Sequential(job, alpha=1.5)
    with pytest.raises(ConfigError, match="sweeps"):
        Sequential(job, sweeps=0)
    with pytest.raises(ConfigError, match="'validated' are chosen for a whole run"):
        Sequential(job, threads=1).run(tasks)


def test_step_weights_inside_asymmetric_calibration(tiny, tokens):
    """The first layers see the same inputs in both rollouts: there each weighting gives its open-loop codes."""
    for spec in ("alpha=1/4", "trace", "balanced", "loss", "minimax"):
        _, job, config, tasks = setup(tiny, tokens, step_weights=spec)
        plain = open_loop(tiny, tokens, config)
        found = Sequential(job, threads=1).run(tasks)
        for task in tasks:
            report = found[task.parameter.name].report
            assert report["step_weighting"] == spec
            assert sum(report["step_weights"]) == pytest.approx(1.0)
            if task.leader == tasks[0].leader:
                name = task.parameter.name
                np.testing.assert_array_equal(found[name].codes, plain[name].codes)
                assert report["step_weights"] == pytest.approx(plain[name].report["step_weights"])
    _, job, _, tasks = setup(tiny, tokens)
    by_sum = Sequential(job, threads=1).run(tasks)
    _, _, _, tasks = setup(tiny, tokens, step_weights="alpha=1/3")
    by_alpha = Sequential(job, threads=1).run(tasks)
    assert all(by_alpha[n].same_as(by_sum[n]) for n in by_sum)


def test_recollection_with_full_precision_weights_is_open_loop(tiny, tokens):
    """Layers at 8 bits per channel change the rollout by next to nothing; at 2 bits they change the Hessians."""
    _, job, config, tasks = setup(tiny, tokens, method="gptq")
    plain = open_loop(tiny, tokens, config)
    coarse = open_loop(
        tiny, tokens, dataclasses.replace(config, layer=dataclasses.replace(config.layer, bits=2))
    )
    again = recollected(job, tasks, coarse, threads=1)
    assert list(again) == list(plain)
    same = [again[n].same_as(plain[n]) for n in plain]
    assert not all(same)
    assert all(layer.report["inputs"] == "closed-loop" for layer in again.values())


def test_equal_rows_uses_each_position_once(tiny, tokens):
    selection, job, config, _ = setup(tiny, tokens)
    rows = EqualRows(job, seed=1, threads=1).run()
    n_positions = sum(s.size for s in tokens.sequences)
    for p in selection.input_groups:
        acc = rows.accumulator(p.name, [0, 1, 2])
        counts = [acc.n_rows(t) for t in range(3)]
        assert sum(counts) == n_positions
        assert max(counts) - min(counts) <= 1
    layers = solve_arm(rows, selection, tiny.system, config, 1)
    assert all(layer.report["n_rows"] == n_positions for layer in layers.values() if layer.report["steps"])
    steps = rows.step_of(np.arange(30), 3)
    assert all(sorted(steps[i : i + 3]) == [0, 1, 2] for i in range(0, 30, 3))
    assert (steps != EqualRows(job, seed=2).step_of(np.arange(30), 3)).any()


def test_the_public_function_spreads_the_rows_of_one_step(tiny, tokens):
    import loopq

    config = QuantConfig(LayerConfig(group_size=16), rank_threshold=None)
    selection, job, _, _ = setup(tiny, tokens)
    expected = solve_arm(EqualRows(job, threads=1).run(), selection, tiny.system, config, 1)
    found = loopq.quantize(tiny, tokens, config, inputs="equal-rows", batch_size=5, threads=1)
    plain = loopq.quantize(tiny, tokens, config, batch_size=5, threads=1)
    assert all(found.layers[n].same_as(x) for n, x in expected.items())
    assert any(not found.layers[n].same_as(x) for n, x in plain.layers.items())
    n_positions = sum(s.size for s in tokens.sequences)
    assert {x.report["n_rows"] for x in found.layers.values() if x.report["steps"]} == {n_positions}


def test_the_public_function_runs_layer_by_layer(tiny, tokens):
    import loopq

    config = QuantConfig(LayerConfig(method="full", bits=3, group_size=16), rank_threshold=None)
    _, job, _, tasks = setup(tiny, tokens)
    found = loopq.quantize(
        tiny, tokens, dataclasses.replace(config, inputs="asymmetric"), batch_size=5, threads=1
    )
    expected = Sequential(job, threads=1).run(tasks)
    assert all(found.layers[n].same_as(expected[n]) for n in expected)
    for bad in ({"inputs": "both"}, {"alpha": 2.0}, {"sweeps": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            dataclasses.replace(config, **bad)
