"""The gradient tier and the scores, on the tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.config import LayerConfig, QuantConfig
from loopq.errors import ConfigError
from loopq.evaluate.compare import compare
from loopq.evaluate.stats import spearman
from loopq.quantizers.arms import collect_all_steps, solve_arm
from loopq.tune.scores import draw_labels, loop_fisher, measured
from loopq.tune.tuner import TuneConfig, tune
from loopq.tune.unroll import divergence, linked, unroll


@pytest.fixture
def layers(tiny, tokens):
    sums, selection = collect_all_steps(tiny.system, tokens)
    config = QuantConfig(LayerConfig(method="full", bits=2, group_size=16), rank_threshold=None)
    return solve_arm(sums, selection, tiny.system, config, 1)


def test_unrolled_rollout_is_the_rollout(tiny, tokens):
    batch = next(tokens.batches(3, seed=4))
    plain = tiny.system.rollout(batch, 3)
    torch.testing.assert_close(unroll(tiny.system, batch, 3), plain, rtol=0, atol=0)


def test_linked_weights_get_the_gradient_of_all_steps_and_leave_no_trace(tiny, tokens):
    batch = next(tokens.batches(2, seed=0))
    name = "transformer.adapter.weight"
    before = list(tiny.model.state_dict())
    own = tiny.model.get_parameter(name)
    reference = tiny.system.rollout(batch, 3)
    leaf = (own.detach() * 1.05).requires_grad_(True)

    def loss(values):
        with linked(tiny.system, {name: values}):
            return divergence(reference, unroll(tiny.system, batch, 3), "logits")

    (grad,) = torch.autograd.grad(loss(leaf), leaf)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0))
    eps = 2e-4
    with torch.no_grad():
        slope = float(loss(leaf + eps * direction) - loss(leaf - eps * direction)) / (2 * eps)
    assert float((grad * direction).sum()) == pytest.approx(slope, rel=0.08)
    assert tiny.model.get_parameter(name) is own
    assert list(tiny.model.state_dict()) == before
    torch.testing.assert_close(tiny.system.rollout(batch, 3), reference, rtol=0, atol=0)
    with linked(tiny.system, {name: leaf}):
        truncated = divergence(reference, unroll(tiny.system, batch, 3, truncate=1), "logits")
    (late,) = torch.autograd.grad(truncated, leaf)
    assert not torch.allclose(late, grad)


@pytest.mark.parametrize("what", ["scales", "codes"])
def test_tuning_lowers_the_divergence_and_keeps_the_format(tiny, tokens, layers, what):
    train, held_out = tokens.take(0, 7), tokens.take(7)
    config = TuneConfig(
        what=what, n_updates=60, every=20, patience=9, scale_rate=1e-2, code_rate=2e-2, batch_size=7
    )
    found = tune(tiny.system, layers, train, held_out, config)
    assert min(v for _, v in found.history) < found.history[0][1]
    assert found.history[0][0] == 0
    weights = {n: x.in_model_orientation() for n, x in found.layers.items()}
    start = {n: x.in_model_orientation() for n, x in layers.items()}
    _, before, after = compare(tiny.system, {"before": start, "after": weights}, held_out)
    assert after.kl.mean() < before.kl.mean()
    for name, layer in found.layers.items():
        assert layer.n_bytes == layers[name].n_bytes
        assert layer.codes.min() >= -2
        assert layer.codes.max() <= 1
        np.testing.assert_array_equal(layer.scales, layer.scales.astype(np.float16).astype(np.float32))
        assert layer.report["tier"] == f"gradient, {what}"
    assert (found.flipped > 0) == (what == "codes")
    again = tune(tiny.system, layers, train, held_out, config)
    assert all(again.layers[n].same_as(found.layers[n]) for n in layers)


def test_refuses_to_stop_early_on_what_it_tuned_on(tiny, tokens, layers):
    with pytest.raises(ConfigError, match="held-out"):
        tune(tiny.system, layers, tokens, tokens.take(2, 3))
    for bad in ({"what": "all"}, {"n_updates": 0}, {"every": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            TuneConfig(**bad)


def test_fisher_scores_predict_small_single_layer_errors(tiny, tokens):
    """In the quadratic regime the prediction is the measured KL up to sampling, and ranks layers alike."""
    rng = np.random.default_rng(0)
    ways = {}
    for p in tiny.system.shared_parameters(3):
        weight = tiny.system.parameter(p).detach().numpy()
        noise = rng.normal(size=weight.shape) * 0.02 * np.abs(weight).mean() * rng.lognormal(sigma=1.5)
        ways[p.name, "noise"] = (weight + noise).astype(np.float32)
    truth = measured(tiny.system, ways, tokens)
    guess = loop_fisher(tiny.system, ways, tokens, n_samples=8)
    assert [s.name for s in truth] == [s.name for s in guess] == list(ways)
    assert spearman([s.cost for s in truth], [s.cost for s in guess]) >= 0.9
    ratio = np.array([g.cost / t.cost for g, t in zip(guess, truth, strict=True)])
    assert np.median(np.abs(np.log(ratio))) < np.log(1.5)


def test_labels_have_the_distribution_of_the_model():
    logits = np.random.default_rng(0).normal(size=8).astype(np.float32) * 2
    logp = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    n = 40_000
    labels = draw_labels(np.broadcast_to(logp, (n // 100, 100, 8)), [1, 2])
    share = np.bincount(labels.ravel(), minlength=8) / n
    p = np.exp(logp.astype(np.float64))
    assert (np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / n)).all()


def test_rounding_changes_few_labels():
    """No more than the total variation allows; inversion of the cumulative distribution changes many times that."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 100, 512)) * 2
    here, there = (
        (x - np.log(np.exp(x).sum(-1, keepdims=True))).astype(np.float32)
        for x in (logits, logits + 1e-2 * rng.normal(size=logits.shape))
    )
    p, q = (np.exp(x.astype(np.float64)) for x in (here, there))
    bound = np.abs(p - q).sum()
    changed = (draw_labels(here, [3]) != draw_labels(there, [3])).sum()
    assert 0 < changed < bound + 4 * np.sqrt(bound)
    assert np.abs(p.cumsum(-1) - q.cumsum(-1)).sum() > 5 * bound
