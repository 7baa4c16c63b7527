"""GPTQ as published, in plain NumPy float64: the twin that the core must agree with.

One column after the other with the upper Cholesky factor of the inverse of the damped Hessian, no blocks. Scales
are taken from the compensated weights when the sweep reaches a group ("group") or from the original weights
("static"), rounded to their stored type before any code is computed.
"""

from __future__ import annotations

import numpy as np

SCALE = {"float32": np.float32, "float16": np.float16}


def group_grid(block, bits, symmetric, scale_dtype):
    """Scales and zero points, one for each row of `block`."""
    if symmetric:
        top = np.abs(block).max(axis=1)
        scale = top / (2 ** (bits - 1) - 1)
        zero = np.zeros(len(top))
    else:
        low, high = np.minimum(block.min(axis=1), 0), np.maximum(block.max(axis=1), 0)
        scale = (high - low) / (2**bits - 1)
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32).astype(SCALE[scale_dtype]).astype(np.float64)
    if not symmetric:
        zero = np.clip(np.round(-low / scale), 0, 2**bits - 1)
    return scale, zero


def to_grid(column, scale, zero, bits, symmetric):
    """Codes of one column, half to even, clipped."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    return np.clip(np.round(column / scale) + zero, low, high)


def gptq(
    weight, hessian, *, bits, group_size, damping, symmetric=True, scales="group", scale_dtype="float32"
):
    """Return codes, scales and zero points."""
    w = weight.astype(np.float64).copy()
    original = w.copy()
    rows, d = w.shape
    g = group_size if group_size > 0 else d
    h = hessian + damping * np.mean(np.diag(hessian)) * np.eye(d)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    codes = np.zeros((rows, d))
    n_groups = -(-d // g)
    scale, zero = np.zeros((rows, n_groups)), np.zeros((rows, n_groups))
    for j in range(d):
        k = j // g
        if j % g == 0:
            source = original if scales == "static" else w
            scale[:, k], zero[:, k] = group_grid(source[:, j : j + g], bits, symmetric, scale_dtype)
        codes[:, j] = to_grid(w[:, j], scale[:, k], zero[:, k], bits, symmetric)
        error = (w[:, j] - (codes[:, j] - zero[:, k]) * scale[:, k]) / upper[j, j]
        w[:, j + 1 :] -= np.outer(error, upper[j, j + 1 :])
    return codes.astype(np.int64), scale, zero
