"""The packed layout `lq-w4` of the int4 kernel in NumPy: reference version of `kernels/README.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopq.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


K_STEP = 32
"""The input width must be a multiple of this."""
N_STEP = 16
"""The output width must be a multiple of this: one strip."""
TILE_K = 64
"""Rows of a tile; a short last tile is filled up with zeros."""
WORDS_PER_TILE = 128
_OFFSET = 8
"""A code q in -8..7 is stored as q + 8; padding is stored as 8, exactly zero."""


def packed_shape(out_features: int, in_features: int) -> tuple[int, int]:
    """Shape of the packed weight: (strips of 16 outputs, words per strip).

    Raises
    ------
    ConfigError
        If the widths are not multiples of 16 (outputs) and 32 (inputs).
    """
    if out_features <= 0 or in_features <= 0 or out_features % N_STEP or in_features % K_STEP:
        raise ConfigError(
            f"the int4 kernel takes an output width that is a multiple of {N_STEP} and an input width "
            f"that is a multiple of {K_STEP}; got ({out_features}, {in_features}). Keep this layer unpacked"
        )
    return out_features // N_STEP, -(-in_features // TILE_K) * WORDS_PER_TILE


def pack_w4(codes: NDArray[np.int8]) -> NDArray[np.int32]:
    """Pack int4 codes into the kernel's layout.

    Parameters
    ----------
    codes : ndarray of int8, shape (out, in)
        Values in -8..7. `out` is a multiple of 16, `in` a multiple of 32.

    Returns
    -------
    ndarray of int32, shape (out / 16, ceil(in / 64) * 128)
        One strip of 16 outputs per row.

    Raises
    ------
    ConfigError
        If the shape is different or a code lies outside -8..7.

    Notes
    -----
    With K = in rounded up to 64, KT = K / 64 and u = q + 8::

        word(k, n) = ((n >> 4) * KT + (k >> 6)) * 128 + (4 (n & 7) + ((k & 7) >> 1)) * 4 + ((k >> 4) & 3)
        nibble(k, n) = 2 ((n >> 3) & 1) + ((k >> 3) & 1) + 4 (k & 1)

    Examples
    --------
    >>> import numpy as np
    >>> pack_w4(np.ones((16, 32), np.int8)).view(np.uint32)[0, :4]
    array([2576980377, 2576980377, 2290649224, 2290649224], dtype=uint32)
    """
    if codes.ndim != 2 or codes.dtype != np.int8:
        raise ConfigError(f"codes are {codes.dtype} of shape {codes.shape}; expected int8 (out, in)")
    out_features, in_features = codes.shape
    shape = packed_shape(out_features, in_features)
    if codes.min() < -_OFFSET or codes.max() > 7:
        raise ConfigError(f"int4 codes lie in -8..7; got {codes.min()}..{codes.max()}")
    tiles = shape[1] // WORDS_PER_TILE
    stored = np.full((out_features, tiles * TILE_K), _OFFSET, np.uint32)
    stored[:, :in_features] = codes.astype(np.int32) + _OFFSET
    # n = (strip, half, column), k = (tile, step of 16, high 8, pair, odd)
    split = stored.reshape(shape[0], 2, 8, tiles, 4, 2, 4, 2)
    words = np.zeros((shape[0], tiles, 8, 4, 4), np.uint32)
    for half in range(2):
        for high in range(2):
            for odd in range(2):
                nibble = split[:, half, :, :, :, high, :, odd]  # (strip, column, tile, step, pair)
                words |= nibble.transpose(0, 2, 1, 4, 3) << np.uint32(4 * (2 * half + high + 4 * odd))
    return words.reshape(shape).view(np.int32)


def level_bytes(levels: Sequence[int] | None) -> NDArray[np.int32]:
    """Four words of a kernel's 16 bytes for a table: each level plus 128. Zeros for even levels.

    Raises
    ------
    ConfigError
        If there are not 16 levels of -127..127.
    """
    if levels is None:
        return np.zeros(4, np.int32)
    if len(levels) != 16 or min(levels) < -127 or max(levels) > 127:
        raise ConfigError(
            f"a table has 16 levels of -127..127, in sixteenths of the scale; got {list(levels)}"
        )
    return np.array(levels, np.int8).view(np.uint8).__xor__(128).view(np.int32)
