"""Floating-point numbers of few bits: E2M1, E4M3, and powers of two. Spec: docs/formats/levels.md."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Magnitudes of E2M1 by their three bits: two of exponent, one of mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALF = np.array(MAGNITUDES, np.float32)
#: Values of E2M1 by their four bits: a sign and a magnitude.
_E2M1 = np.concatenate([_HALF, -_HALF])
#: Positive numbers of float8_e4m3fn, and zero, by their bits: 1.mmm times 2^(eeee - 7), and 0.mmm times 2^-6.
E4M3 = np.array(
    [(m + 8 * (e > 0)) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:127], np.float32
)
#: Values by all eight bits. The last number of each sign is no number, and none is infinite.
_E4M3 = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values of float8 codes with 1 sign, 4 exponent and 3 mantissa bits. The bias is 7, and there is no infinity."""
    values: NDArray[np.float32] = _E4M3[codes]
    return values


def e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values of 4-bit float codes. A byte holds two, the first in the low half, so (rows, n) gives (rows, 2 n)."""
    return np.stack((_E2M1[packed & 15], _E2M1[packed >> 4]), -1).reshape(len(packed), -1)


def powers(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Scales that are powers of two: 2^(code - 127), float32."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
