"""Numbers of few bits against torch's own types."""

from __future__ import annotations

import numpy as np
import torch

from loopq.layers.numbers import MAGNITUDES, e2m1, e4m3, powers


def test_every_float8_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3(codes.numpy()), expected)


def test_fours_come_low_half_first_and_scales_are_powers() -> None:
    packed = np.array([[0x21, 0xFE]], np.uint8)
    np.testing.assert_array_equal(e2m1(packed), np.array([[0.5, 1, -4, -6]], np.float32))
    np.testing.assert_array_equal(powers(np.array([0, 127, 130], np.uint8)), [2.0**-127, 1, 8])


def test_magnitudes_of_four_bits_are_those_of_their_fields() -> None:
    # Two bits of exponent with bias 1, one of mantissa: m / 2 without, (1 + m / 2) 2^(e - 1) with a leading one.
    expected = [m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1) for e in range(4) for m in (0, 1)]
    assert list(MAGNITUDES) == expected
    low = np.arange(8, dtype=np.uint8)[None]
    np.testing.assert_array_equal(e2m1(low)[:, ::2], np.float32([expected]))
    np.testing.assert_array_equal(e2m1(low << 4 | 8 << 4)[:, 1::2], -np.float32([expected]))
