"""Quantized linear layers and what they stand for."""

from __future__ import annotations

import numpy as np


def asymmetric(bits=3, rows=6, columns=20, group_size=8, seed=0):
    """Arguments of `from_codes` for a layer with zero points, and its weight in float64."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size == -1 else -(-columns // group_size)
    codes = rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    zeros = rng.integers(0, 1 << bits, (rows, groups)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.2, (rows, groups)).astype(np.float16).astype(np.float32)
    index = np.arange(columns) // (columns if group_size == -1 else group_size)
    weight = (codes.astype(float) - zeros[:, index]) * scales[:, index]
    return {
        "codes": codes, "scales": scales, "group_size": group_size, "bits": bits, "zeros": zeros,
    }, weight  # fmt: skip
