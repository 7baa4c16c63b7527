"""Damping of the diagonal of H: its kinds, dead channels, and spikes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import ConfigError
from loopq.quantizers.damping import Damping
from tests.support.problems import correlated, solve


def test_damping_kinds():
    rng = np.random.default_rng(4)
    hessian = correlated(rng, 40)
    d = np.diag(hessian)
    np.testing.assert_allclose(Damping(0.1, "mean").vector(hessian), 0.1 * d.mean())
    np.testing.assert_allclose(Damping(0.1, "median").vector(hessian), 0.1 * np.median(d))
    np.testing.assert_allclose(Damping(0.1, "diagonal").vector(hessian), 0.1 * d)
    tail = np.linalg.eigvalsh(hessian)[:-1].sum() / 40
    np.testing.assert_allclose(Damping(0.1, "tail").vector(hessian), 0.1 * tail)
    spike = rng.normal(size=40)
    loud = hessian + 1e9 * np.outer(spike, spike)
    assert Damping(0.1, "tail").vector(loud)[0] < 2 * Damping(0.1, "mean").vector(hessian)[0]
    assert Damping(0.1, "mean").vector(loud)[0] > 1e6 * Damping(0.1, "mean").vector(hessian)[0]
    hessian[3] = hessian[:, 3] = 0
    assert Damping(0.1, "diagonal").vector(hessian)[3] > 0


@pytest.mark.parametrize("kind", ["mean", "median", "diagonal", "tail"])
@pytest.mark.parametrize("method", ["gptq", "gptq-cd"])
def test_dead_channels_are_counted_under_every_damping(tiny, tokens, kind, method):
    with torch.no_grad():
        tiny.model.get_parameter("transformer.core_block.0.norm_3.weight")[[1, 5]] = 0
    result = loopq.quantize(tiny, tokens, method=method, damping_kind=kind, bits=4, group_size=16, threads=1)
    dead = {n: x.report["n_dead_columns"] for n, x in result.layers.items() if x.report["n_dead_columns"]}
    assert dead == {"transformer.core_block.0.mlp.fc.weight": 2}


def test_gptq_with_mean_damping_spelled_out_is_the_same():
    rng = np.random.default_rng(5)
    weight, hessian = rng.normal(size=(8, 40)).astype(np.float32), correlated(rng, 40)
    plain = solve("gptq", weight, hessian, bits=3, group_size=8)
    flat = hessian / np.sqrt(np.outer(np.diag(hessian), np.diag(hessian)))
    by_diagonal = solve("gptq", weight, flat, bits=3, group_size=8, damping_kind="diagonal")
    by_mean = solve("gptq", weight, flat, bits=3, group_size=8)
    np.testing.assert_array_equal(by_diagonal.codes, by_mean.codes)
    assert plain.report["n_dead_columns"] == 0


@pytest.mark.parametrize("bad", [{"damping": -0.1}, {"damping": float("nan")}, {"damping_kind": "x"}])
def test_refuses_what_cannot_be(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        solve("gptq", np.ones((2, 4), np.float32), np.eye(4), **bad)
