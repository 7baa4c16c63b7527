"""Logits and caches in outputs of several forms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopq.errors import SystemContractError
from loopq.systems.outputs import cache_name, cached, logits_of, past

LOGITS = torch.zeros(1, 2, 3)


class Remembers(nn.Module):
    """A forward with a cache argument of older versions of transformers."""

    def forward(self, ids, past_key_values=None, use_cache=False): ...


@pytest.mark.parametrize("output", [LOGITS, {"logits": LOGITS}, SimpleNamespace(logits=(LOGITS, 1))])
def test_logits_are_found_in_every_form(output: object) -> None:
    assert logits_of(output) is LOGITS


def test_a_rollout_with_a_cache_is_refused() -> None:
    with pytest.raises(SystemContractError, match="the forward kept a cache"):
        logits_of(SimpleNamespace(logits=LOGITS, past_key_values=()))


def test_a_cached_output_needs_a_cache() -> None:
    kept = object()
    assert cached(SimpleNamespace(logits=LOGITS, cache_params=kept)) == (LOGITS, kept)
    with pytest.raises(SystemContractError, match="the forward kept no cache"):
        cached(SimpleNamespace(logits=LOGITS, cache=None))


def test_other_outputs_are_refused() -> None:
    with pytest.raises(SystemContractError, match="no logits"):
        logits_of(SimpleNamespace(hidden=LOGITS))
    with pytest.raises(SystemContractError, match="no logits"):
        logits_of(torch.zeros(2, 3))


def test_a_cache_is_given_under_the_name_of_the_forward() -> None:
    assert cache_name(Remembers().forward) == "past_key_values"
    assert cache_name(nn.Linear(1, 1).forward) is None
    assert past(Remembers(), None) == {"use_cache": True}
    assert past(Remembers(), "kept") == {"use_cache": True, "past_key_values": "kept"}
