"""Codes out of the kernel's layout of int4 weights, which only tests need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.runtime.cuda.layout import N_STEP, TILE_K, WORDS_PER_TILE, packed_shape


def unpack_w4(packed: NDArray[np.int32], in_features: int) -> NDArray[np.int8]:
    """Codes (out, in) of a packed weight. Inverse of `pack_w4`.

    Raises
    ------
    ConfigError
        If the shape of `packed` does not match `in_features`, or it holds codes beyond that.
    """
    strips = packed.shape[0] if packed.ndim else 0
    if packed.ndim != 2 or packed.shape != packed_shape(strips * N_STEP, in_features):
        raise ConfigError(f"packed weight of shape {packed.shape} does not hold {in_features} inputs")
    tiles = packed.shape[1] // WORDS_PER_TILE
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(strips, tiles, 8, 4, 4)
    codes = np.empty((strips, 2, 8, tiles, 4, 2, 4, 2), np.int8)
    for half in range(2):
        for high in range(2):
            for odd in range(2):
                nibble = (words >> np.uint32(4 * (2 * half + high + 4 * odd))) & np.uint32(15)
                codes[:, half, :, :, :, high, :, odd] = nibble.transpose(0, 2, 1, 4, 3).astype(np.int8) - 8
    whole = codes.reshape(strips * N_STEP, tiles * TILE_K)
    if np.any(whole[:, in_features:]):
        raise ConfigError(f"the packed weight holds codes beyond {in_features} inputs: is this its width?")
    return whole[:, :in_features].copy()
