"""Layers of small models: attention looks only back, tables have an end."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import ConfigError
from loopq.systems import find_system
from loopq.systems.base import Batch
from tests.support.systems import CASES, build, small
from tests.support.zoo import IDS


@torch.no_grad()
@pytest.mark.parametrize("name", ["Huginn", "R-Llama", "Ouro", "Nanbeige", "LoopFormer", "Parcae", "Ponder"])
def test_logits_look_only_back(name: str) -> None:
    system = find_system(build(CASES[name]))
    n_steps = system.n_steps

    def run(ids: torch.Tensor, start: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        batch = Batch(ids, (0, 1, 2))
        embedding = system.embed(batch)
        first = state = system.initial_state(batch, embedding) if start is None else start
        for t in range(system.n_updates(n_steps)):
            state = system.step(state, embedding, t, n_steps)
        return first, system.predict(state, embedding)

    start, full = run(IDS, None)
    _, part = run(IDS[:, :7], start[:, :7] if system.state_is_random else None)
    torch.testing.assert_close(part, full[:, :7], atol=2e-5, rtol=1e-4)


def test_sequences_longer_than_the_tables_and_caches_are_refused() -> None:
    long = torch.zeros(1, 33, dtype=torch.int64)
    for kind in ("huginn", "parcae", "loopformer"):
        with pytest.raises(ConfigError, match="block_size 32"):
            small(kind)()(long)
    with pytest.raises(ConfigError, match="has no cache"):
        small("huginn")()(IDS, use_cache=True)
