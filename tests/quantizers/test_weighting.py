"""Step weights and damping: the identities of Li, App. P, and what spikes may not do."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import loopq
import loopq._native as native
from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.select import select
from loopq.config import LayerConfig, QuantConfig, parse_step_weights
from loopq.errors import ConfigError
from loopq.quantizers.arms import collect_all_steps, solve_arm
from loopq.quantizers.damping import damping_vector
from loopq.quantizers.weighting import alpha_weights, balanced_weights, combine, loss_weights, minimax_weights
from tests.quantizers.test_gptq import correlated, solve


def accumulate(steps):
    """An accumulator from the rows of each step."""
    acc = native.HessianAccumulator(steps[0].shape[1], range(len(steps)), per_step=True, threads=1)
    for t, rows in enumerate(steps):
        acc.update(t, np.ascontiguousarray(rows, dtype=np.float32))
    acc.finish()
    return acc


def rollout(rng, n_steps=4, n=80, d=24):
    base = rng.normal(size=(n, d)) @ (np.eye(d) + 0.3 * rng.normal(size=(d, d)))
    return [base + 0.5 * rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * 0.3 for _ in range(n_steps)]


@pytest.mark.parametrize("method", ["gptq", "full"])
def test_alpha_identities_hold_bit_for_bit(tiny, tokens, method):
    sums, selection = collect_all_steps(tiny.system, tokens)

    def arm(steps, weights):
        layer = LayerConfig(method=method, bits=3, group_size=16, step_weights=weights)
        return solve_arm(
            sums, selection, tiny.system, QuantConfig(layer, steps=steps, rank_threshold=None), 1
        )

    for alpha, steps in (("alpha=1/3", "all"), ("alpha=0", "1:"), ("alpha=1", "first")):
        weighed, plain = arm("all", alpha), arm(steps, "sum")
        assert all(weighed[n].same_as(plain[n]) for n in plain), alpha
    other, plain = arm("all", "alpha=0.9"), arm("all", "sum")
    assert any(not other[n].same_as(plain[n]) for n in plain)
    assert other[selection.parameters[0].name].report["step_weights"] == pytest.approx([0.9, 0.05, 0.05])


def test_alpha_is_exact_and_refuses_nonsense():
    assert alpha_weights(Fraction(1, 3), 3) == [Fraction(1, 3)] * 3
    assert alpha_weights(Fraction(1, 7), 1) == [1]
    assert parse_step_weights("alpha=0.15") == Fraction(3, 20)
    for bad in ("alpha=2", "alpha=-1", "alpha=", "alpha=1/0", "mean", ""):
        with pytest.raises(ConfigError, match="step_weights"):
            LayerConfig(step_weights=bad)


def test_weights_need_each_step_apart(tiny, tokens):
    selection = select(tiny.system, tokens)
    sums = HessianSet(
        Collection(tiny.system, tokens, selection), {p.name: [0, 1, 2] for p in selection.input_groups}
    )
    sums.run_pass(list(sums.steps))
    config = QuantConfig(LayerConfig(bits=3, group_size=16, step_weights="balanced"), rank_threshold=None)
    with pytest.raises(ConfigError, match="need the Hessian of each step"):
        solve_arm(sums, selection, tiny.system, config, 1)


def test_balanced_shares_are_equal_and_follow_scalings():
    rng = np.random.default_rng(0)
    rows = rollout(rng)
    w = balanced_weights(accumulate(rows), range(4))
    diagonals = np.stack([np.square(r.astype(np.float32)).sum(0) for r in rows])
    shares = np.array(w)[:, None] * diagonals
    shares /= shares.sum(0)
    np.testing.assert_allclose(shares.sum(1), 24 / 4, rtol=1e-5)
    loud = [rows[0] * 64, *rows[1:]]
    np.testing.assert_allclose(
        balanced_weights(accumulate(loud), range(4))[0] * 64**2 / w[0],
        balanced_weights(accumulate(loud), range(4))[1] / w[1],
        rtol=1e-9,
    )
    channel = np.where(np.arange(24) == 5, 1024.0, 1.0)
    again = balanced_weights(accumulate([r * channel for r in rows]), range(4))
    np.testing.assert_allclose(np.array(again) / again[0], np.array(w) / w[0], rtol=1e-9)


@pytest.mark.parametrize("weights", ["balanced", "trace", "loss"])
@pytest.mark.parametrize("method", ["gptq", "full"])
def test_a_spike_in_step_zero_changes_no_code(method, weights):
    """All of step 0 is kappa times louder, as at the bottleneck of Ouro: normalised steps do not care."""
    rng = np.random.default_rng(1)
    rows, weight = rollout(rng), rng.normal(size=(16, 24)).astype(np.float32)
    rounded = solve("rtn", weight, None, bits=3, group_size=8).dequantize()

    def codes(kappa, spec):
        acc = accumulate([rows[0] * np.sqrt(kappa), *rows[1:]])
        if spec == "sum":
            hessian = acc.matrix()
        else:
            made = {
                "balanced": lambda: balanced_weights(acc, range(4)),
                "trace": lambda: [1 / acc.trace(t) for t in range(4)],
                "loss": lambda: loss_weights(acc, range(4), weight, rounded),
            }[spec]()
            hessian = combine(acc, range(4), made)
        return solve(method, weight, hessian, bits=3, group_size=8).codes

    plain = codes(1.0, weights)
    for kappa in (1e2, 1e4, 1e6):
        np.testing.assert_array_equal(codes(kappa, weights), plain)
    assert (codes(1e6, "sum") != codes(1.0, "sum")).any(), "the spike is too weak to test anything"


def test_a_channel_spike_changes_no_code_under_equivariant_damping():
    """A channel kappa times louder whose column is kappa times smaller; from 100 on it rounds to nothing."""
    rng = np.random.default_rng(2)
    rows, weight = rollout(rng), rng.normal(size=(16, 24)).astype(np.float32)

    def codes(kappa, kind):
        factor = np.where(np.arange(24) == 5, kappa, 1.0)
        acc = accumulate([r * factor for r in rows])
        hessian = combine(acc, range(4), balanced_weights(acc, range(4)))
        turned = (weight / factor).astype(np.float32)
        settings = {"damping_kind": kind, "damping": 0.01}
        return solve("full", turned, hessian, bits=3, group_size=8, **settings).codes

    plain = codes(1e2, "diagonal")
    for kappa in (1e4, 1e6):
        np.testing.assert_array_equal(codes(kappa, "diagonal"), plain)
    assert (codes(1e6, "mean") != codes(1e2, "mean")).any()


def test_minimax_lowers_the_worst_step():
    rng = np.random.default_rng(3)
    rows, weight = rollout(rng), rng.normal(size=(16, 24)).astype(np.float32)
    rows[0] = rows[0] * 20
    acc = accumulate(rows)
    rounded = solve("rtn", weight, None, bits=3, group_size=8).dequantize()

    def found(hessian):
        return solve("gptq", weight, hessian, bits=3, group_size=8).dequantize()

    def worst(weights):
        error = found(combine(acc, range(4), weights)) - weight
        plain = rounded - weight
        return max(
            np.trace(error @ h @ error.T) / np.trace(plain @ h @ plain.T)
            for h in map(acc.matrix, [[0], [1], [2], [3]])
        )

    w = minimax_weights(acc, range(4), weight, rounded, found)
    assert worst(w) < worst([1.0, 1.0, 1.0, 1.0])
    assert worst(w) <= worst(loss_weights(acc, range(4), weight, rounded))


def test_damping_kinds():
    rng = np.random.default_rng(4)
    hessian = correlated(rng, 40)
    d = np.diag(hessian)
    np.testing.assert_allclose(damping_vector(hessian, "mean", 0.1), 0.1 * d.mean())
    np.testing.assert_allclose(damping_vector(hessian, "median", 0.1), 0.1 * np.median(d))
    np.testing.assert_allclose(damping_vector(hessian, "diagonal", 0.1), 0.1 * d)
    tail = np.linalg.eigvalsh(hessian)[:-1].sum() / 40
    np.testing.assert_allclose(damping_vector(hessian, "tail", 0.1), 0.1 * tail)
    spike = rng.normal(size=40)
    loud = hessian + 1e9 * np.outer(spike, spike)
    assert damping_vector(loud, "tail", 0.1)[0] < 2 * damping_vector(hessian, "mean", 0.1)[0]
    assert damping_vector(loud, "mean", 0.1)[0] > 1e6 * damping_vector(hessian, "mean", 0.1)[0]
    hessian[3] = hessian[:, 3] = 0
    assert damping_vector(hessian, "diagonal", 0.1)[3] > 0


@pytest.mark.parametrize("kind", ["mean", "median", "diagonal", "tail"])
@pytest.mark.parametrize("method", ["gptq", "full"])
def test_dead_channels_are_counted_under_every_damping(tiny, tokens, kind, method):
    with torch.no_grad():
        tiny.model.get_parameter("transformer.core_block.0.norm_3.weight")[[1, 5]] = 0
    found = loopq.quantize(tiny, tokens, method=method, damping_kind=kind, bits=4, group_size=16, threads=1)
    dead = {n: x.report["n_dead_columns"] for n, x in found.layers.items() if x.report["n_dead_columns"]}
    assert dead == {"transformer.core_block.0.mlp.fc.weight": 2}


def test_gptq_with_mean_damping_spelled_out_is_the_same():
    rng = np.random.default_rng(5)
    weight, hessian = rng.normal(size=(8, 40)).astype(np.float32), correlated(rng, 40)
    plain = solve("gptq", weight, hessian, bits=3, group_size=8)
    flat = hessian / np.sqrt(np.outer(np.diag(hessian), np.diag(hessian)))
    by_diagonal = solve("gptq", weight, flat, bits=3, group_size=8, damping_kind="diagonal")
    by_mean = solve("gptq", weight, flat, bits=3, group_size=8)
    np.testing.assert_array_equal(by_diagonal.codes, by_mean.codes)
    assert plain.report["n_dead_columns"] == 0
