"""Errors by layer and step, on a linear loop where they are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.calibrate.data import from_ids
from loopq.evaluation import layers
from loopq.models.systems.generic import Generic
from loopq.systems.declare import parameter_of
from tests.support.looptoys import LinearLoop, LinearSystem, tokens
from tests.support.odd_loop import Settling

N_STEPS = 4


def changed(model, name, factor):
    return {f"{name}.weight": factor * getattr(model, name).weight.detach().numpy().astype(np.float32)}


@pytest.fixture
def system():
    return LinearSystem(LinearLoop(width=6))


def test_a_scaled_weight_adds_one_share_a_step_and_feeds_back(system):
    weights = changed(system.model, "adapter", 1.25) | changed(system.model, "core", 1.0)
    errors = layers.layer_errors(system, {"Q": weights}, tokens(), n_steps=N_STEPS, batch_size=2)["Q"]
    assert errors["own"]["adapter.weight"] == pytest.approx([0.25] * N_STEPS)
    assert max(errors["own"]["core.weight"]) < 1e-6
    # At step 0 all layers before have their inputs of full precision; what reads the adapter is off by as much.
    assert [errors["moved"][n][0] for n in ("adapter.weight", "core.weight")] == pytest.approx([0.25, 0.25])
    with torch.no_grad():
        (batch,) = tokens().batches(3)
        e = system.embed(batch)
        plain = other = system.initial_state(batch, e)
        for moved in errors["moved"]["adapter.weight"]:
            a, b = (system.model.adapter(torch.cat([s, e], -1)) for s in (plain, other))
            assert moved == pytest.approx(float((1.25 * b - a).norm() / a.norm()), rel=1e-5)
            plain, other = a + system.model.core(a), 1.25 * (b + system.model.core(b))
    assert errors["moved"]["adapter.weight"][1] != pytest.approx(0.25, rel=1e-3)


def test_the_models_own_weights_have_no_error_and_stay(system):
    before = system.model.core.weight.clone()
    errors = layers.layer_errors(
        system,
        {"same": changed(system.model, "core", 1.0), "worse": changed(system.model, "core", 2.0)},
        tokens(),
    )
    assert max(errors["same"]["own"]["core.weight"]) < 1e-6
    assert errors["worse"]["own"]["core.weight"] == pytest.approx([1.0] * 8)
    assert torch.equal(system.model.core.weight, before)


def test_few_rows_and_prompts_are_taken_of_many(system, monkeypatch):
    monkeypatch.setattr(layers, "N_ROWS", 3)
    monkeypatch.setattr(layers, "N_PROMPTS", 2)
    ran = []
    rollout = type(system).rollout

    def counted(self, batch, n_steps):
        ran.extend(batch.prompts)
        return rollout(self, batch, n_steps)

    # Of the class: other weights run in a copy of the adapter.
    monkeypatch.setattr(type(system), "rollout", counted)
    errors = layers.layer_errors(
        system, {"Q": changed(system.model, "core", 1.5)}, tokens(n_prompts=9, n_tokens=7), n_steps=2
    )
    assert ran == [0, 1, 0, 1]
    assert errors["Q"]["own"]["core.weight"] == pytest.approx([0.5, 0.5])


def test_what_is_not_finite_is_none(system):
    with np.errstate(all="ignore"):
        weights = {"core.weight": np.full((6, 6), 3e38, np.float32)}
    errors = layers.layer_errors(system, {"Q": weights}, tokens(), n_steps=3)
    assert errors["Q"]["moved"]["core.weight"][-1] is None


def test_every_layer_of_a_published_loop(loaded, tokens):
    weights = {
        p.name: parameter_of(loaded.system.model, p).detach().numpy()
        for p in loaded.system.shared_parameters(3)
    }
    errors = layers.layer_errors(
        loaded.system, {"Q": {n: 1.5 * w for n, w in weights.items()}}, tokens, n_steps=3
    )
    for values in errors["Q"]["own"].values():
        assert values == pytest.approx([0.5] * 3, rel=1e-4)


def test_a_loop_that_ends_by_itself_has_no_errors_by_step():
    system = Generic(Settling())
    ids = from_ids([list(range(i, i + 8)) for i in range(0, 48, 8)])
    system.look(ids.first())
    # A larger weight takes more steps to settle.
    changed = {"core.weight": 1.5 * system.model.core.weight.detach().numpy()}
    errors = layers.layer_errors(system, {"Q": changed}, ids, batch_size=1)["Q"]
    assert set(errors["moved"]["core.weight"]) == set(errors["own"]["core.weight"]) == {None}
