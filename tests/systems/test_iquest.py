"""IQuest-Coder-Loop: what the adapter computes for all tokens at once is what the class computes one by one."""

from __future__ import annotations

import pytest
import torch

from loopq.systems.base import Batch
from tests.support.systems import CASES, open_system, prompts


def _one_by_one(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    past, logits = None, []
    for position in range(ids.shape[1]):
        out = model(ids[:, position : position + 1], past_key_values=past)
        past = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.fixture
def system():
    opened = open_system(CASES["IQuest"])
    with torch.no_grad():
        for gate in opened.model.model.gate_projections:
            gate.weight.normal_(generator=torch.Generator().manual_seed(1))
    return opened


@pytest.mark.parametrize("n_steps", [1, 2, 3])
@torch.no_grad()
def test_all_tokens_at_once_are_the_tokens_one_by_one(system, n_steps):
    batch = prompts(CASES["IQuest"])
    assert batch.input_ids.shape[1] > 2 * system.model.config.loop_window_size
    system.model.model.loop_num = n_steps
    expected = _one_by_one(system.model, batch.input_ids)
    torch.testing.assert_close(system.rollout(batch, n_steps), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_window_and_gate_matter(system):
    batch = prompts(CASES["IQuest"])
    before = system.rollout(batch, 2)
    for change in ({"loop_window_size": 3}, {"loop_window_size": 10}):
        for name, value in change.items():
            setattr(system.model.model, name, value)
        assert not torch.allclose(system.rollout(batch, 2), before, atol=1e-4)
    system.model.model.loop_window_size = 4
    system.model.model.gate_projections[0].bias.fill_(9.0)
    assert not torch.allclose(system.rollout(batch, 2), before, atol=1e-4)


@torch.no_grad()
def test_going_on_from_the_cache_is_the_rollout(system):
    batch = prompts(CASES["IQuest"])
    whole = system.rollout(batch, 2)
    cache, seen, parts = None, 0, []
    for until in (6, 7, batch.input_ids.shape[1]):
        upto = Batch(batch.input_ids[:, :until], batch.prompts, batch.seed)
        logits, cache = system.extend(upto, 2, seen, cache)
        parts.append(logits)
        seen = until
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
