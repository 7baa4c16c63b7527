"""The cache of fixed size: every text in every division gives the logits of a rollout, without moving a tensor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loopq.errors import ConfigError, SystemContractError
from loopq.systems import fixed
from loopq.systems.base import Batch
from loopq.systems.fixed import FixedCache, Positioned
from tests.support.systems import CASES, open_system

_NAMES = [name for name, case in CASES.items() if isinstance(open_system(case), fixed.FixedCached)]


def _batch(n, n_prompts=3):
    ids = torch.randint(4, 56, (n_prompts, 20), generator=torch.Generator().manual_seed(3))[:, :n]
    return Batch(ids, tuple(range(n_prompts)), by_token=True)


@pytest.mark.parametrize("name", _NAMES)
def test_any_division_of_a_text_gives_the_logits_of_a_rollout(name, monkeypatch):
    # Three growths, one of them with one token and one with several.
    monkeypatch.setattr(fixed, "BLOCK", 4)
    system = open_system(CASES[name])
    system.model.double()
    n_steps = CASES[name].depths[-1]
    expected = system.rollout(_batch(20), n_steps)
    for ends in ((20,), (6, 7, 8, 9, 13, 20)):
        cache, seen, parts = None, 0, []
        for end in ends:
            logits, cache = system.extend(_batch(end), n_steps, seen, cache)
            parts.append(logits)
            seen = end
        torch.testing.assert_close(torch.cat(parts, 1).float(), expected.float(), rtol=1e-6, atol=1e-6)
        assert int(cache.length) == cache.room == 20


@pytest.mark.parametrize("name", ["Huginn", "LoopFormer", "Ouro", "Parcae"])
@torch.no_grad()
def test_a_step_that_reads_its_position_from_a_tensor_moves_nothing(name):
    system = open_system(CASES[name])
    system.model.double()
    _, cache = system.extend(_batch(8), 2, 0, None)
    places = [part.data_ptr() for slot in cache.slots for part in slot]
    expected = system.rollout(_batch(11), 2)
    for n in (8, 9, 10):
        batch = _batch(n + 1)
        logits = system.continued(batch.input_ids[:, n:], system.noise(batch, n), 2, cache)
        torch.testing.assert_close(logits[:, 0].float(), expected[:, n].float(), rtol=1e-6, atol=1e-6)
    assert [part.data_ptr() for slot in cache.slots for part in slot] == places
    assert int(cache.length) == 11
    # Another text in the same tensors.
    other = Batch(_batch(8).input_ids.flip(1), (0, 1, 2), by_token=True)
    logits, _ = system.extend(other, 2, 0, cache)
    torch.testing.assert_close(logits.float(), system.rollout(other, 2).float(), rtol=1e-6, atol=1e-6)
    assert [part.data_ptr() for slot in cache.slots for part in slot] == places


@pytest.mark.parametrize("name", ["Huginn", "LoopFormer", "Parcae"])
def test_a_text_beyond_the_positions_is_refused(name):
    system = open_system(CASES[name])
    batch = Batch(torch.full((1, 33), 5), (0,), by_token=True)
    with pytest.raises(ConfigError, match=f"{system.name}: 33 tokens, but the model has 32 positions"):
        system.extend(batch, 1, 0, None)


@torch.no_grad()
def test_the_cache_of_a_class_comes_first(monkeypatch):
    system = open_system(CASES["Nanbeige"])
    right, kept = type(system.model).forward, []

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        kept.append(past_key_values)
        return SimpleNamespace(
            logits=right(self, input_ids, use_cache=False).logits, past_key_values="of the class"
        )

    assert not system.class_caches
    monkeypatch.setattr(type(system.model), "forward", forward)
    assert system.class_caches
    _, cache = system.extend(_batch(4), 2, 0, None)
    system.extend(_batch(5), 2, 4, cache)
    assert (cache, kept) == ("of the class", [None, "of the class"])


def test_a_model_with_windows_has_no_cache():
    system = open_system(CASES["Ouro"])
    assert system.caches()
    system.model.config.layer_types = ["full_attention", "sliding_attention"]
    assert system.extend(_batch(4), 1, 0, None) is None


def test_a_model_that_attends_in_its_own_way_has_no_cache(monkeypatch):
    import loopq.zoo.layers

    monkeypatch.setattr(loopq.zoo.layers.F, "scaled_dot_product_attention", lambda q, k, v, **_: v)
    with pytest.raises(ConfigError, match="SmallHuginn does not attend by torch's function: no cache"):
        open_system(CASES["Huginn"]).extend(_batch(4), 1, 0, None)


def test_a_rollout_that_attends_another_number_of_times_is_refused():
    cache = FixedCache(torch.device("cpu"))
    cache.reserve(4)
    x = torch.randn(1, 1, 1, 2)
    with cache.continued(1, 0):
        for _ in range(2):
            F.scaled_dot_product_attention(x, x, x)
    with pytest.raises(SystemContractError, match="attends 1 times, the first one 2"), cache.continued(1, 1):
        F.scaled_dot_product_attention(x, x, x)
    with pytest.raises(SystemContractError, match="more than 2 times"), cache.continued(1, 1):
        for _ in range(3):
            F.scaled_dot_product_attention(x, x, x)


def test_scale_and_shared_heads_of_a_call_are_kept():
    cache = FixedCache(torch.device("cpu"))
    cache.reserve(5)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    same = {"scale": 0.7, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, **same)
    parts = []
    for first, end in ((0, 2), (2, 3), (3, 5)):
        part = slice(first, end)
        with cache.continued(end - first, first):
            parts.append(
                F.scaled_dot_product_attention(
                    q[:, :, part], k[:, :, part], v[:, :, part], is_causal=True, **same
                )
            )
    torch.testing.assert_close(torch.cat(parts, 2), expected)


def test_angles_of_other_positions_have_the_shape_of_those_asked_for():
    class Rotary(nn.Module):
        def forward(self, x, position_ids):
            return position_ids

    asked = torch.arange(2).expand(3, 2)
    given = Positioned(Rotary(), torch.tensor([7, 8]))(None, position_ids=asked)
    assert given.tolist() == [[7, 8]] * 3
