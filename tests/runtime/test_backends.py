"""The ways to compute logits: the first whose trial agrees is used, and each one before it says why not."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import ConfigError
from loopq.runtime.generate import Decoder, Generation
from tests.support.systems import CASES, open_system, rolled_out

_TEXT = [5, 9, 7, 30, 11, 12]


def test_each_backend_before_the_used_one_has_a_reason():
    decoder = Decoder(open_system(CASES["control"]), 1, Generation())
    assert decoder.backend.name == "rollout"
    assert decoder.declined == {
        "runner": "the runner takes models with codes, on the processor",
        "graph": "loopq records steps on a GPU, not on cpu",
        "cache": "the model has no cache",
        "exit": "the loop runs to its last step",
    }
    system = open_system(CASES["Ouro"])
    early = Decoder(system, 2, Generation(exit=0.5))
    assert early.backend.name == "exit"
    assert early.declined == dict.fromkeys(("runner", "graph", "cache"), "left early")
    with pytest.raises(ConfigError, match=r"^kv: only loopq's runner .* is not used: left early$"):
        Decoder(system, 2, Generation(exit=0.5, kv=8))


def test_a_cache_that_fails_or_gives_other_logits_is_not_used(monkeypatch):
    system = open_system(CASES["transformers HRM-Text"])
    right = system.extend
    monkeypatch.setattr(system, "extend", lambda *args: (right(*args)[0] * 1.01, None))
    assert Decoder(system, 2, Generation()).declined["cache"] == "the cache gives other logits"
    monkeypatch.setattr(system, "extend", lambda *args: [][0])
    decoder = Decoder(system, 2, Generation())
    assert "IndexError" in decoder.declined["cache"]
    torch.testing.assert_close(decoder(_TEXT), rolled_out(system, _TEXT, 2)[-1])


@pytest.mark.parametrize(("name", "low", "high"), [("Huginn", 1e-9, 1e3), ("Ouro", 1.0, 0.0)])
def test_a_loop_is_left_early_by_the_models_own_rule(name, low, high):
    """With a threshold that is met at once, and with one that never is."""
    system = open_system(CASES[name])
    late, early = (Decoder(system, 3, Generation(exit=x)) for x in (low, high))
    torch.testing.assert_close(late(_TEXT), rolled_out(system, _TEXT, 3)[-1], rtol=1e-5, atol=1e-5)
    first = 2 if name == "Huginn" else 1
    torch.testing.assert_close(early(_TEXT), rolled_out(system, _TEXT, first)[-1], rtol=1e-5, atol=1e-5)
    assert (late.depths, early.depths) == ([3], [first])
