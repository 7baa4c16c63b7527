"""Spectra that are known."""

from __future__ import annotations

import numpy as np


def orthogonal(n, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]
