"""Bits under a byte budget: against all combinations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from loopq.config import LayerConfig, QuantConfig
from loopq.quantizers.allocate import Choice, allocate

from loopq.errors import ConfigError


def made(rng, n_layers):
    sizes = rng.integers(1, 9, size=n_layers) * 64
    return [
        Choice(f"blocks.{i}.w.weight", b, int(sizes[i]) * b, float(rng.lognormal(sigma=2)) * 4.0**-b)
        for i in range(n_layers)
        for b in (2, 3, 4)
    ]


def test_is_the_optimum_of_all_combinations():
    rng = np.random.default_rng(0)
    for trial in range(5):
        choices = made(rng, 6)
        ways = [[c for c in choices if c.layer == f"blocks.{i}.w.weight"] for i in range(6)]
        budget = int(sum(w[0].n_bytes for w in ways) * (1.1 + 0.2 * trial))
        possible = [p for p in itertools.product(*ways) if sum(c.n_bytes for c in p) <= budget]
        best = min(sum(c.cost for c in p) for p in possible)
        found = allocate(choices, budget)
        assert found.cost == pytest.approx(best)
        assert found.n_bytes <= budget


def test_settings_of_the_allocation_reach_each_layer():
    choices = made(np.random.default_rng(1), 4)
    found = allocate(choices, sum(c.n_bytes for c in choices if c.bits == 3))
    config = found.apply(QuantConfig(LayerConfig(bits=8)))
    for name, bits in found.bits.items():
        assert config.for_layer(name)[0].bits == bits
    assert config.for_layer("blocks.0.w.weight.more")[0].bits == 8


def test_refuses_what_cannot_fit():
    choices = made(np.random.default_rng(2), 3)
    with pytest.raises(ConfigError, match="smallest"):
        allocate(choices, 10)
    with pytest.raises(ConfigError, match="no choices"):
        allocate([], 10)
