"""Marlin's layout of int4 weights, by its formula."""

from __future__ import annotations

import numpy as np


def marlin_by_formula(codes: np.ndarray) -> np.ndarray:
    """Marlin's word for every (k, n); codes (out, in), in a multiple of 16, out of 64."""
    n_all, k_all = codes.shape
    words = np.zeros(k_all // 16 * 2 * n_all, np.uint32)
    k, n = np.meshgrid(np.arange(k_all), np.arange(n_all), indexing="ij")
    at = (k >> 4) * 2 * n_all + (n >> 6) * 128 + (4 * (n & 7) + ((k & 7) >> 1)) * 4 + ((n >> 4) & 3)
    nibble = 2 * ((n >> 3) & 1) + ((k >> 3) & 1) + 4 * (k & 1)
    np.bitwise_or.at(
        words,
        at.ravel(),
        ((codes.T.astype(np.uint32) + 8) & 15).ravel() << (4 * nibble).ravel().astype(np.uint32),
    )
    return words.reshape(k_all // 16, 2 * n_all).view(np.int32)
