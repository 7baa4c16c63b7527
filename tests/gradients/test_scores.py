"""What the quantization of one layer costs the model, predicted and measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from loopq.errors import ConfigError
from loopq.gradients.scores import draw_labels, loop_fisher, measured


def test_fisher_scores_predict_small_single_layer_errors(tiny, tokens):
    """In the quadratic regime the prediction is the measured KL up to sampling, and ranks layers alike."""
    rng = np.random.default_rng(0)
    candidates = {}
    for p in tiny.system.shared_parameters(3):
        weight = tiny.system.parameter(p).detach().numpy()
        noise = rng.normal(size=weight.shape) * 0.02 * np.abs(weight).mean() * rng.lognormal(sigma=1.5)
        candidates[p.name, "noise"] = (weight + noise).astype(np.float32)
    truth = measured(tiny.system, candidates, tokens)
    guess = loop_fisher(tiny.system, candidates, tokens, n_draws=8)
    assert list(truth) == list(guess) == list(candidates)
    assert spearmanr(list(truth.values()), list(guess.values())).statistic >= 0.9
    ratio = np.array([guess[key] / truth[key] for key in truth])
    assert np.median(np.abs(np.log(ratio))) < np.log(1.5)


def test_labels_have_the_probabilities_of_the_model():
    p = np.array([0.5, 0.0, 0.3, 0.2])
    logp = torch.from_numpy(np.log(np.broadcast_to(p + 1e-30, (40, 500, 4))).astype(np.float32))
    labels = draw_labels(logp, [0, 1]).numpy()
    assert labels.shape == (40, 500)
    np.testing.assert_allclose(np.bincount(labels.ravel(), minlength=4) / labels.size, p, atol=0.015)
    np.testing.assert_array_equal(draw_labels(logp, [0, 1]).numpy(), labels)
    assert (draw_labels(logp, [0, 2]).numpy() != labels).any()


def test_hidden_states_have_no_labels(tiny, tokens, monkeypatch):
    monkeypatch.setattr(type(tiny.system), "output", "hidden")
    name = "transformer.adapter.weight"
    weight = tiny.model.get_parameter(name).detach().numpy()
    with pytest.raises(ConfigError, match="labels cannot be drawn; use measured scores"):
        loop_fisher(tiny.system, {(name, "own"): weight}, tokens)


def test_rounding_changes_few_labels():
    """No more than the total variation allows; inversion of the cumulative distribution changes many times that."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 100, 512)) * 2
    here, there = (
        torch.from_numpy(x).log_softmax(-1).float()
        for x in (logits, logits + 1e-2 * rng.normal(size=logits.shape))
    )
    p, q = (np.exp(x.double().numpy()) for x in (here, there))
    bound = np.abs(p - q).sum()
    changed = int((draw_labels(here, [3]) != draw_labels(there, [3])).sum())
    assert 0 < changed < bound + 4 * np.sqrt(bound)
    assert np.abs(p.cumsum(-1) - q.cumsum(-1)).sum() > 5 * bound
