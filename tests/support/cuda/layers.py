"""Codes and scales of small symmetric layers, and the weight that they stand for."""

from __future__ import annotations

import numpy as np


def layer_parts(
    out_features: int = 48, in_features: int = 160, group_size: int = 64, bits: int = 4, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    half = 1 << (bits - 1)
    codes = rng.integers(-half, half, (out_features, in_features)).astype(np.int8)
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    return codes, rng.uniform(0.5, 2.0, (out_features, groups)).astype(np.float32)


def dense(codes: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    size = codes.shape[1] if group_size == -1 else group_size
    return codes * np.repeat(scales.astype(np.float64), size, axis=1)[:, : codes.shape[1]]
