"""Layers to quantize, and how a test has them quantized."""

from __future__ import annotations

import numpy as np
from loopq.config import LayerConfig

import loopq._native as native
from loopq.quantizers import QUANTIZERS, Problem


def solve(method, weight, hessian, **settings):
    return QUANTIZERS.get(method)(
        Problem("layer.weight", weight, hessian, LayerConfig(method=method, **settings), "out_in", 2, {})
    )


def correlated(rng, d, rows=None):
    """A Hessian with a few strong directions, as activations have them."""
    x = rng.normal(size=(rows or 2 * d, d)) @ (np.eye(d) + 0.5 * rng.normal(size=(d, d)) / np.sqrt(d))
    x += 3 * rng.normal(size=(len(x), 1)) * rng.normal(size=d)
    return x.T @ x


def values_of(result, group_size, dim):
    return native.dequantize(result["codes"], result["scales"], result["zeros"], group_size or dim)
