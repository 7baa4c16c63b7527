"""A property of every method: one factor for one input."""

from __future__ import annotations

import numpy as np
import pytest

import loopq._native as native
from loopq.errors import OutOfMemoryError
from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig
from tests.support.kills import counting


@pytest.mark.parametrize("method", ["gptq", "gptq-cd"])
def test_queries_keys_and_values_share_one_factor(method, monkeypatch):
    rng = np.random.default_rng(0)
    x, shared, calls = rng.normal(size=(64, 16)), {}, []
    config = LayerConfig.of(method=method, bits=3, group_size=8)
    weights = rng.normal(size=(3, 4, 16)).astype(np.float32)

    def layers(shared):
        problems = [Problem("x", w, x.T @ x, config.grid, threads=1, shared=shared()) for w in weights]
        return [config.quantize(problem) for problem in problems]

    alone = layers(dict)
    monkeypatch.setattr(native, "DampedFactor", counting(native.DampedFactor, calls))
    together = layers(lambda: shared)
    assert len(calls) == 1
    assert all(a.same_as(b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_every_method_names_the_layer_that_memory_ran_out_in(method, monkeypatch):
    def fails(self, problem):
        raise MemoryError("Unable to allocate 4.00 MiB")

    config = LayerConfig.of(method=method, group_size=4)
    monkeypatch.setattr(type(config.method), "quantize", fails)
    problem = Problem("a.weight", np.ones((2, 4), np.float32), np.eye(4), config.grid)
    with pytest.raises(OutOfMemoryError, match=r"^layer a\.weight: no memory: Unable"):
        config.quantize(problem)
