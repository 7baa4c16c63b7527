"""Prompts that a model writes: its own tokens, the same each time, as by its whole rollout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import loopq
from loopq.calibrate.prompts import Take, calibration_tokens
from loopq.calibrate.written import written
from loopq.errors import ConfigError
from loopq.models.load import load_model


def test_written_tokens_are_the_same_with_and_without_a_cache(monkeypatch):
    system = load_model("huginn_small").system
    known = np.arange(97, 123)
    tokens = written(system, (10,), known, 12, 3)
    assert [s.size for s in tokens.sequences] == [12] * 3
    assert all(s[0] == 10 and np.isin(s[1:], known).all() for s in tokens.sequences)
    assert len({s.tobytes() for s in tokens.sequences}) == 3
    monkeypatch.setattr(type(system), "extend", lambda *_: None)
    assert written(system, (10,), known, 12, 3).digest() == tokens.digest()


def test_what_it_writes_is_likelier_to_it_than_random_tokens():
    loaded = load_model("huginn_small")
    tokens = calibration_tokens(loaded, "self", Take(n_prompts=4, seq_len=32))
    assert tokens.describe()["source"] == "text that the model wrote"
    rng = np.random.default_rng(0)
    random = [rng.integers(0, 256, 32) for _ in range(4)]
    nll = [
        loopq.evaluate(loaded, {}, ids, threads=1)[0].nll.mean() for ids in (list(tokens.sequences), random)
    ]
    assert nll[0] < 0.7 * nll[1]


def test_hidden_states_write_nothing():
    loaded = load_model("huginn_small")
    loaded.system.output = "hidden"
    with pytest.raises(ConfigError, match="hidden states"):
        calibration_tokens(dataclasses.replace(loaded), "self", Take(n_prompts=1, seq_len=4))
    assert torch.is_grad_enabled()
