"""Systems that run step by step."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import SystemContractError
from loopq.systems.base import Batch, differentiable
from loopq.systems.stepwise import StepwiseSystem, single_steps, steps_of
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem


class Counter(StepwiseSystem):
    """The state is the embedding plus the number of steps."""

    name = "counter"
    n_steps = 2

    @classmethod
    def matches(cls, model):
        return False

    def shared_parameters(self, n_steps):
        return ()

    def _rollout(self, ids, batch, n_steps):
        return self.model.table(ids) + n_steps

    def _embed(self, ids):
        return self.model.table(ids)

    def step(self, state, embedding, t, n_steps):
        return state + 1

    def predict(self, state, embedding):
        return state


def test_a_system_tells_whether_it_can_run_step_by_step() -> None:
    able, blind = LinearSystem(LinearLoop()), BlindSystem(LinearLoop())
    assert steps_of(able) is single_steps(able) is able
    assert steps_of(blind) is None
    with pytest.raises(SystemContractError, match="system 'blind-toy' has no single-step function"):
        single_steps(blind)


def test_parts_start_from_the_embedding_with_a_graph_on_request() -> None:
    system, batch = Counter(LinearLoop()), Batch(torch.tensor([[0, 1]]), (0,))
    embedding = system.embed(batch)
    assert system.initial_state(batch, embedding) is embedding
    assert system.n_updates(2) == 2
    assert torch.equal(system.rollout(batch, 2), embedding + 2)
    assert not system.rollout(batch, 2).requires_grad
    with differentiable(system):
        assert system.rollout(batch, 2).requires_grad
