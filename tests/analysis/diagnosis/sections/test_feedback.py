"""Errors that a loop feeds back, against closed forms."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import rollouts
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import feedback
from loopq.errors import ConfigError
from loopq.settings.execution import Execution
from tests.support.looperrors import INT4
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens, under


def test_full_feedback_is_the_natural_rollout_bit_for_bit(system):
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    (batch,) = tokens().batches(8)
    reference = rollouts.trace(system, batch, 8)
    natural = rollouts.run_under(system, batch, 8, changed, None).states[-1]
    with under(system, changed) as other:
        assert torch.equal(feedback.intervened(other, batch, 8, reference, 1.0), natural)


def test_no_feedback_is_the_error_of_one_step(system):
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    (batch,) = tokens().batches(8)
    reference = rollouts.trace(system, batch, 8)
    with under(system, changed) as other:
        state = feedback.intervened(other, batch, 8, reference, 0.0)
        single = other.step(reference.states[7], other.embed(batch), 7, 8)
    assert torch.equal(state, single)


@pytest.mark.parametrize("strength", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_feedback_follows_the_closed_form(system, strength):
    # e_{t+1} = D(s_t) + lambda J^ e_t with D the map's error: e_N = sum_j (lambda J^)^j D(s_{N-1-j}).
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    new = changed["adapter.weight"].astype(np.float64)
    (batch,) = tokens(n_prompts=1).batches(8)
    reference = rollouts.trace(system, batch, 8)
    states = [s[0].numpy() for s in reference.states]
    ids = batch.input_ids[0]
    j = system.model.jacobian(new)
    defects = [
        states[t] @ (j - system.model.jacobian()).T + system.model.drive(ids, new) - system.model.drive(ids)
        for t in range(8)
    ]
    expected = sum(defects[7 - k] @ np.linalg.matrix_power(strength * j, k).T for k in range(8))
    with under(system, changed) as other:
        state = feedback.intervened(other, batch, 8, reference, strength)[0].numpy()
    np.testing.assert_allclose(state - states[8], expected, atol=1e-12)
    # The error of the last step but one passes the full-precision map, and meets that of the last step.
    passed = defects[6] @ system.model.jacobian().T
    cosine = (passed * defects[7]).sum() / np.linalg.norm(passed) / np.linalg.norm(defects[7])
    curve = feedback.feedback_curve(Context(system, tokens(n_prompts=1), 8), changed, seeds=(0,))
    np.testing.assert_allclose(curve.returned, [cosine], atol=1e-9)


def test_one_step_returns_no_error(system):
    changed = feedback.split_weights(system, 1, INT4, numpy_rounder)["all columns"]
    curve = feedback.feedback_curve(Context(system, tokens(), 1), changed, seeds=(0,))
    assert (curve.returned, curve.to_json()["returned"]) == (None, None)


def test_error_rises_with_feedback_where_errors_add_up():
    # A positive map and a positive defect: nothing cancels, so every prompt's curve rises.
    model = LinearLoop(core=0.0)
    with torch.no_grad():
        model.adapter.weight.abs_()
        model.table.weight.abs_()
        model.adapter.weight[:, :6] *= 0.6 / np.abs(np.linalg.eigvals(model.jacobian())).max()
    system = LinearSystem(model)
    system.initial_state = lambda batch, e: torch.ones_like(e)
    new = {"adapter.weight": (model.adapter.weight.detach() * 1.05).float().numpy()}
    curve = feedback.feedback_curve(Context(system, tokens(), 8), new, seeds=(0, 1))
    data = curve.to_json()
    assert data["mean_is_monotone"]
    assert data["monotone_prompts"] == data["n_prompts"] == 3
    assert data["ratio"]["low"] > 1.5
    assert data["n_seeds"] == 2
    assert (np.diff(curve.error, axis=0) > 0).all()


@pytest.mark.parametrize("first", [0, 2])
def test_a_curve_averages_a_prompts_error_over_initial_states(system, first):
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    data = dataclasses.replace(tokens(n_prompts=3), scored_from=first)
    strengths = (0.5, 0.0, 1.0)
    curve = feedback.feedback_curve(
        Context(system, data, 8, execution=Execution(batch_size=2)), changed, lambdas=strengths, seeds=(0, 1)
    )
    assert curve.lambdas == (0.0, 0.5, 1.0)
    errors, agreements = np.zeros((2, 3)), np.zeros((2, 3))
    for seed in (0, 1):
        (batch,) = data.batches(8, seed)
        reference = rollouts.trace(system, batch, 8)
        for row, strength in enumerate((0.5, 1.0)):
            with under(system, changed) as other:
                state = feedback.intervened(other, batch, 8, reference, strength)
            apart = (state - reference.states[-1]).flatten(1).norm(dim=1) / reference.states[-1].flatten(
                1
            ).norm(dim=1)
            errors[row] += apart.numpy() / 2
            same = system.predict(state, None).argmax(-1) == reference.outputs[8].argmax(-1)
            agreements[row] += same[:, first:].double().mean(1).detach().numpy() / 2
    np.testing.assert_allclose(curve.error[1:], errors, rtol=1e-9)
    np.testing.assert_allclose(curve.agreement[1:], agreements)
    assert curve.agreement.min() < 1
    assert curve.to_json()["agreement"] == pytest.approx(curve.agreement.mean(axis=1).tolist())


def test_a_curve_says_where_it_falls():
    def said(*error):
        return feedback.FeedbackCurve((0.0, 0.5, 1.0), np.array(error), None, 1).to_json()

    rising = said([1.0, 2.0], [1.0, 3.0], [4.0, 4.0])
    assert (rising["mean_is_monotone"], rising["monotone_prompts"], rising["agreement"]) == (True, 2, None)
    assert rising["ratio"]["estimate"] == pytest.approx(np.sqrt(4.0 * 2.0))
    assert rising["error"] == [1.5, 2.0, 4.0]
    falling = said([1.0, 2.0], [0.9, 2.2], [0.8, 1.0])
    assert (falling["mean_is_monotone"], falling["monotone_prompts"]) == (False, 0)
    assert falling["ratio"]["estimate"] == pytest.approx(np.sqrt(0.4))
    mixed = said([1.0, 2.0], [0.5, 2.5], [1.0, 3.0])
    assert (mixed["mean_is_monotone"], mixed["monotone_prompts"]) == (True, 1)
    assert said([1e-6, 2e-6], [0.999e-6, 3e-6], [2e-6, 4e-6])["monotone_prompts"] == 1
    # Within rounding nothing falls.
    assert said([1.0, 1.0], [1.0, 1.0 - 1e-10], [1.0, 1.0])["monotone_prompts"] == 2
    assert said([0.0, 1.0], [1.0, 1.0], [1.0, 1.0])["ratio"] is None
    assert said([1.0, 1.0], [1.0, 1.0], [0.0, 1.0])["ratio"] is None


def test_feedback_study_is_plain_data(system):
    study = feedback.feedback_study(
        Context(system, tokens(), 8, rounder=numpy_rounder), {"per channel": INT4}, lambdas=(0, 1), seeds=(0,)
    )
    assert set(study["per channel"]) == {"all columns", "state columns", "embedding columns"}
    assert study["per channel"]["all columns"]["lambdas"] == [0, 1]
    with pytest.raises(ConfigError, match="between 0 and 1"):
        feedback.feedback_curve(Context(system, tokens(), 8), {}, lambdas=(0, 0.5, 1.5))
    for bad in ((), (-0.5, 1)):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            feedback.feedback_curve(Context(system, tokens(), 8), {}, lambdas=bad)


def test_a_fixed_initial_state_needs_one_seed(system):
    def n_seeds():
        settings = {"per channel": INT4}
        study = feedback.feedback_study(
            Context(system, tokens(), 2, rounder=numpy_rounder), settings, lambdas=(1,), seeds=(0, 1)
        )
        return study["per channel"]["all columns"]["n_seeds"]

    assert n_seeds() == 2
    system.state_is_random = False
    assert n_seeds() == 1


def test_feedback_without_exposed_layers_rounds_all():
    class Covered(LinearSystem):
        name = "covered-toy"

        def shared_parameters(self, n_steps):
            return BlindSystem(self.model).shared_parameters(n_steps)

    variants = feedback.split_weights(Covered(LinearLoop()), 8, INT4, numpy_rounder)
    assert {name: sorted(w) for name, w in variants.items()} == {
        "all columns": ["adapter.weight", "core.weight"]
    }


def test_the_exposed_layer_is_studied_at_every_group_and_share(whole):
    section = whole[0]["sections"]["feedback"]
    assert section["layers"] == ["adapter.weight"]
    assert list(section["settings"]) == ["per channel", "grouped"]
