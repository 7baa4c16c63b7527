"""Signed rounding to nearest, per tensor or per group of columns, for the controls (Li, App. M)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopq.errors import ConfigError


def round_signed(matrix: ArrayLike, bits: int, group_size: int | None = None) -> NDArray[np.float64]:
    """Round to a symmetric signed grid, half to even.

    Parameters
    ----------
    matrix : array_like, float
        Values.
    bits : int
        At least 2.
    group_size : int, optional
        Columns of a row that share a scale. The last group may be smaller. By default the tensor has one scale.

    Returns
    -------
    float64 ndarray of the same shape
        Rounded values scale * clip(round(M / scale), -q - 1, q). The scale is max|M| / q with q = 2^(bits-1) - 1.
    """
    if bits < 2:
        raise ConfigError(f"a signed grid needs at least 2 bits; got {bits}")
    values = np.array(matrix, dtype=np.float64)
    if group_size is None:
        return _one_scale(values, bits, None)
    if group_size < 1 or values.ndim != 2:
        raise ConfigError(f"groups need a matrix and a size >= 1; got {values.ndim}-D and {group_size}")
    for start in range(0, values.shape[1], group_size):
        values[:, start : start + group_size] = _one_scale(values[:, start : start + group_size], bits, 1)
    return values


def _one_scale(values: NDArray[np.float64], bits: int, axis: int | None) -> NDArray[np.float64]:
    top = 2 ** (bits - 1) - 1
    scale = np.abs(values).max(axis=axis, keepdims=True) / top
    safe = np.where(scale > 0, scale, 1.0)
    out: NDArray[np.float64] = safe * np.clip(np.round(values / safe), -top - 1, top)
    return out
