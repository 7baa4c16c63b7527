"""Marlin's layout of int4 weights by its formula, and what only tests do with the kernel's own: the core's twins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loopq.cuda.layout import N_STEP, TILE_K, WORDS_PER_TILE, packed_shape
from loopq.errors import ConfigError


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


def from_marlin(words: NDArray[np.int32], in_features: int, out_features: int) -> NDArray[np.int32]:
    """Packed weight from Marlin's: the same words in another order. The file's padding is removed.

    Parameters
    ----------
    words : ndarray of int32, shape (K / 16, 2 N)
        Marlin's 4-bit layout of a K x N matrix. K and N may exceed the layer's widths (padding).
    in_features, out_features : int
        Widths of the layer.

    Returns
    -------
    ndarray of int32, shape (out / 16, ceil(in / 64) * 128)

    Raises
    ------
    ConfigError
        If the file's matrix is smaller than the layer, or the padding beyond the layer is not zero.

    Notes
    -----
    Marlin's word (16-row tile kt, 64-column tile nt, lane, j) goes to native word
    ``((4 nt + j) KT + (kt >> 2)) * 128 + 4 lane + (kt & 3)``; no nibble moves.
    """
    shape = packed_shape(out_features, in_features)
    if words.ndim != 2:
        raise ConfigError(f"a Marlin weight of shape {words.shape}; expected (K / 16, 2 N)")
    k16, double_n = words.shape
    if k16 * 16 < in_features or double_n // 2 < out_features or double_n % 128:
        raise ConfigError(
            f"a Marlin weight of shape {words.shape} holds at most {k16 * 16} inputs and {double_n // 2} "
            f"outputs; the layer has {in_features} and {out_features}"
        )
    tiles = shape[1] // WORDS_PER_TILE
    zero = np.uint32(0x88888888)
    source = np.ascontiguousarray(words).view(np.uint32).reshape(k16, double_n // 128, 32, 4)
    strips = source.transpose(1, 3, 0, 2).reshape(-1, k16, 32)  # (nt and j, step of 16 inputs, lane)
    used = in_features // 16
    if np.any(strips[:, used:] != zero) or np.any(strips[shape[0] :] != zero):
        raise ConfigError(
            f"a Marlin weight holds codes beyond {in_features} inputs and {out_features} outputs: are these the "
            f"layer's widths?"
        )
    filled = np.full((shape[0], tiles * 4, 32), zero, np.uint32)
    filled[:, :used] = strips[: shape[0], :used]
    native = filled.reshape(shape[0], tiles, 4, 32).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(native).reshape(shape).view(np.int32)
