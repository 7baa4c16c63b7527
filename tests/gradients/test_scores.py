"""The model's loss from the quantization of one layer, predicted and measured."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from loopq.errors import ConfigError, SystemContractError
from loopq.evaluation.compare import compare
from loopq.gradients.scores import loop_fisher
from loopq.systems.declare import parameter_of
from tests.support.looptoys import LinearLoop, LinearSystem, tokens


def test_fisher_scores_predict_small_single_layer_errors(tiny, tokens):
    """The prediction equals the measured KL up to sampling in the quadratic regime, and ranks layers
    alike."""
    rng = np.random.default_rng(0)
    candidates = {}
    for p in tiny.system.shared_parameters(3):
        weight = parameter_of(tiny.system.model, p).detach().numpy()
        noise = rng.normal(size=weight.shape) * 0.02 * np.abs(weight).mean() * rng.lognormal(sigma=1.5)
        candidates[p.name, "noise"] = (weight + noise).astype(np.float32)
    variants = {name: {name: weight} for (name, _), weight in candidates.items()}
    each = compare(tiny.system, variants, tokens, seeds=(0,))[1:]
    truth = {key: float(m.kl.mean()) for key, m in zip(candidates, each, strict=True)}
    guess = loop_fisher(tiny.system, candidates, tokens, n_draws=8)
    assert list(truth) == list(guess) == list(candidates)
    assert spearmanr(list(truth.values()), list(guess.values())).statistic >= 0.9
    ratio = np.array([guess[key] / truth[key] for key in truth])
    assert np.median(np.abs(np.log(ratio))) < np.log(1.5)


def test_hidden_states_have_no_labels(tiny, tokens, monkeypatch):
    monkeypatch.setattr(type(tiny.system), "output", "hidden")
    name = "transformer.adapter.weight"
    weight = tiny.model.get_parameter(name).detach().numpy()
    with pytest.raises(ConfigError, match="labels cannot be drawn; use measured scores"):
        loop_fisher(tiny.system, {(name, "own"): weight}, tokens)


def test_a_layer_without_a_gradient_is_named():
    class Detached(LinearSystem):
        def predict(self, state, embedding):
            return super().predict(state, embedding).detach().requires_grad_()

    system = Detached(LinearLoop())
    weight = system.model.core.weight.detach().float().numpy()
    with pytest.raises(SystemContractError, match=r"no gradient reaches core\.weight: use measured scores"):
        loop_fisher(system, {("core.weight", "own"): weight}, tokens())
