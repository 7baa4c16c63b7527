"""Bits within a budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.run.budget import Candidate, Fit, choose, parse_budget


def made(rng, n_layers):
    sizes = rng.integers(1, 9, size=n_layers) * 64
    return [
        Candidate((f"blocks.{i}.w.weight",), int(sizes[i]) * b, float(rng.lognormal(sigma=2)) * 4.0**-b, {})
        for i in range(n_layers)
        for b in (2, 3, 4)
    ]


def test_is_the_optimum_of_all_combinations():
    rng = np.random.default_rng(0)
    for trial in range(5):
        candidates = made(rng, 6)
        of_layer = [[c for c in candidates if c.layers == (f"blocks.{i}.w.weight",)] for i in range(6)]
        budget = int(sum(w[0].n_bytes for w in of_layer) * (1.1 + 0.2 * trial))
        possible = [p for p in itertools.product(*of_layer) if sum(c.n_bytes for c in p) <= budget]
        best = min(sum(c.cost for c in p) for p in possible)
        chosen = choose(candidates, budget)
        assert [c.layers for c in chosen] == [(f"blocks.{i}.w.weight",) for i in range(6)]
        assert sum(c.cost for c in chosen) == pytest.approx(best)
        assert sum(c.n_bytes for c in chosen) <= budget


def test_refuses_what_cannot_fit():
    candidates = made(np.random.default_rng(2), 3)
    with pytest.raises(ConfigError, match="smallest"):
        choose(candidates, 10)
    with pytest.raises(ConfigError, match="no candidates"):
        choose([], 10)


def test_budgets_are_bits_a_weight_or_bytes():
    assert parse_budget("3.25") == 3.25
    assert isinstance(parse_budget("4"), float)
    assert parse_budget("900K") == 900 * 1024
    assert Fit(3.25).n_bytes(1600) == 650
    assert Fit(900).n_bytes(1600) == 900
