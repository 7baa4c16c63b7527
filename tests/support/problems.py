"""Layers to quantize, their Hessians, and how a test has them quantized."""

from __future__ import annotations

import numpy as np

import loopq._native as native
from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig
from tests.support import core

#: Settings that references are written for: the scales of the papers, and one damping for both solvers.
PLAIN = {
    "rtn": {"scale_search": "max"},
    "awq": {"scale_search": "max"},
    "gptq": {"scale_search": "max"},
    "gptq-cd": {"metric": "inputs", "damping_kind": "mean"},
    "trellis": {"metric": "inputs", "damping_kind": "mean"},
}


def solve(method, weight, hessian, *, threads=2, loop_metric=None, **settings):
    """Quantize one float32 weight, outputs first. Settings have flat names; others come from `PLAIN`."""
    config = LayerConfig.of(**({"method": method} | PLAIN[method] | settings))
    return config.quantize(
        Problem("layer.weight", weight, hessian, config.grid, threads=threads, metric=loop_metric)
    )


def correlated(rng, d, rows=None):
    """A Hessian with a few strong directions, as activations have them."""
    x = rng.normal(size=(rows or 2 * d, d)) @ (np.eye(d) + 0.5 * rng.normal(size=(d, d)) / np.sqrt(d))
    x += 3 * rng.normal(size=(len(x), 1)) * rng.normal(size=d)
    return x.T @ x


def values_of(result, group_size, dim):
    """The values of the codes that the core returned."""
    return core.dequantize(result["codes"], result["scales"], result["zeros"], group_size or -1)


def step_rows(rng, n_steps=4, n=80, d=24):
    """Input rows of a layer at each step, much alike."""
    base = rng.normal(size=(n, d)) @ (np.eye(d) + 0.3 * rng.normal(size=(d, d)))
    return [base + 0.5 * rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * 0.3 for _ in range(n_steps)]


def accumulate(steps):
    """An accumulator from the rows of each step."""
    acc = native.HessianAccumulator(steps[0].shape[1], range(len(steps)), per_step=True, threads=1)
    for t, rows in enumerate(steps):
        acc.update(t, np.ascontiguousarray(rows, dtype=np.float32))
    acc.finish()
    return acc
