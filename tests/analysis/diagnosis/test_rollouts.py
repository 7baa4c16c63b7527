"""Rollouts compared: agreement, KL, errors of states."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import exposure, rollouts
from loopq.analysis.diagnosis.context import Context
from loopq.calibrate.data import from_ids
from loopq.errors import ConfigError, NonFiniteError
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent
from tests.support.looperrors import INT4
from tests.support.looptoys import numpy_rounder, tokens, under


def test_a_model_agrees_with_itself_and_kl_is_zero(system):
    comparison = rollouts.run_variants(Context(system, tokens(), 8), {"same": {}})["same"]
    assert (comparison.agreement == 1).all()
    assert (comparison.kl == 0).all()
    assert (comparison.state_error == 0).all()
    assert comparison.steps == tuple(range(1, 9))


def test_the_question_of_a_task_is_not_compared(system):
    new = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    data = dataclasses.replace(tokens(n_tokens=6), scored_from=4)
    comparison = rollouts.run_variants(Context(system, data, 8), {"a": new})["a"]
    (batch,) = data.batches(8)
    whole = system.rollout(batch, 8)[:, 4:].float()
    with under(system, new, 8) as other:
        out = other.rollout(batch, 8)[:, 4:].float()
    assert comparison.positions.tolist() == [2, 2, 2]
    np.testing.assert_allclose(comparison.kl[:, -1], rollouts.kl_divergence(out, whole), rtol=1e-12)
    np.testing.assert_array_equal(comparison.matches[:, -1], (out.argmax(-1) == whole.argmax(-1)).sum(1))


def test_kl_is_positive_unless_equal():
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 7, generator=rng), torch.randn(2, 3, 7, generator=rng)
    assert (rollouts.kl_divergence(a, b) > 0).all()
    assert (rollouts.kl_divergence(a, a + 5.0) < 1e-12).all()
    p, q = torch.softmax(b.double(), -1), torch.softmax(a.double(), -1)
    torch.testing.assert_close(
        torch.from_numpy(rollouts.kl_divergence(a, b)), (p * (p / q).log()).sum(-1).mean(1)
    )


def test_kl_of_equal_distributions_is_never_negative():
    """Where logits differ in their last digits, rounding leaves sums on both sides of zero."""
    drawn = torch.randn(2, 2000, 1, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, near = drawn[0], drawn[0] + 1e-12 * drawn[1]
    p, q = logits.log_softmax(-1), near.log_softmax(-1)
    assert ((p.exp() * (p - q)).sum(-1) < 0).any()
    assert (rollouts.kl_divergence(near, logits) >= 0).all()


def test_errors_are_relative_whatever_the_size_of_the_reference():
    value = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    reference = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    for size in (1e-3, 1.0, 1e3):
        np.testing.assert_allclose(
            rollouts.relative_error(size * value, size * reference), [0.5, 1.0, 0.0], rtol=1e-6
        )


def test_outputs_that_overflow_are_refused_with_the_step(system):
    reference = rollouts.RolloutTrace([], {1: torch.zeros(1, 2, 3), 2: torch.zeros(1, 2, 3)})
    for bad in (float("nan"), float("inf")):
        run = rollouts.RolloutTrace([], {1: torch.zeros(1, 2, 3), 2: torch.full((1, 2, 3), bad)})
        with pytest.raises(NonFiniteError, match="after 2 steps"):
            rollouts.compare_traces(run, reference, logits=True)


def test_hidden_states_are_compared_from_the_first_position_on():
    """Only logits have a question before the answer."""
    one, other = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
    other[0, 0] = 5.0
    comparison = rollouts.compare_traces(
        rollouts.RolloutTrace([], {1: other}),
        rollouts.RolloutTrace([], {1: one}),
        logits=False,
        scored_from=2,
    )
    assert comparison.positions.tolist() == [3]
    np.testing.assert_allclose(comparison.output_error, [[np.sqrt(32 / 6)]], rtol=1e-6)
    assert (comparison.matches, comparison.kl) == (None, None)
    with pytest.raises(ConfigError, match="no top-1 prediction to compare"):
        _ = comparison.agreement


def test_states_are_compared_after_every_update_if_there_is_one(system):
    new = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    comparison = rollouts.run_variants(Context(system, tokens(), 1), {"a": new})["a"]
    assert comparison.state_error.shape == (3, 1)
    assert (comparison.state_error > 0).all()
    alone = rollouts.RolloutTrace([torch.ones(1, 3, 2)], {0: torch.ones(1, 3, 2)})
    assert rollouts.compare_traces(alone, alone, logits=False).state_error is None


def test_progress_is_told_as_many_rollouts_as_there_are(system):
    class Counted(Silent):
        total = done = 0

        def start(self, stage, total, unit):
            self.total += total

        def advance(self, n=1):
            self.done += n

    counted = Counted()
    rollouts.run_variants(
        Context(system, tokens(), 2, execution=Execution(batch_size=1, progress=counted)),
        {"a": {}, "b": {}, "c": {}},
    )
    assert counted.done == counted.total == 3 * 4


def test_comparisons_are_made_position_by_position_and_pooled(system):
    new = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    ids = [s.tolist() for s in tokens(n_prompts=3, n_tokens=12).sequences]
    data = from_ids([ids[0], ids[1][:3], ids[2]])
    comparison = rollouts.run_variants(
        Context(system, data, 8, execution=Execution(batch_size=2)), {"a": new}, read=(8, 2)
    )["a"]
    assert comparison.steps == (2, 8)
    assert comparison.positions.tolist() == [12, 3, 12]
    for number, batch in enumerate(data.batches(1)):
        reference = rollouts.trace(system, batch, 8)
        other = rollouts.run_under(system, batch, 8, new, None)
        for column, step in enumerate((2, 8)):
            a, b = reference.outputs[step][0], other.outputs[step][0]
            assert comparison.matches[number, column] == int((a.argmax(-1) == b.argmax(-1)).sum())
            assert comparison.output_error[number, column] == pytest.approx(
                float((b - a).norm() / a.norm()), rel=1e-5
            )
        apart = [
            float((b - a).norm() / a.norm()) for a, b in zip(reference.states, other.states, strict=True)
        ]
        assert comparison.state_error[number] == pytest.approx(apart[1:])
    np.testing.assert_allclose(comparison.agreement, comparison.matches / [[12], [3], [12]])
    said = comparison.to_json()
    assert (said["n_prompts"], said["n_positions"], said["steps"]) == (3, 27, [2, 8])
    np.testing.assert_allclose(said["agreement"], comparison.agreement.mean(0))
    np.testing.assert_allclose(said["agreement_pooled"], comparison.matches.sum(0) / 27)
    np.testing.assert_allclose(said["kl"], comparison.kl.mean(0))
    np.testing.assert_allclose(said["state_error"], comparison.state_error.mean(0))
    np.testing.assert_allclose(said["output_error"], comparison.output_error.mean(0))
