"""Numbers of few bits against torch's own types."""

from __future__ import annotations

import numpy as np
import torch

from loopq.layers.numbers import e2m1, e4m3, powers


def test_every_float8_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3(codes.numpy()), expected)


def test_fours_come_low_half_first_and_scales_are_powers() -> None:
    packed = np.array([[0x21, 0xFE]], np.uint8)
    np.testing.assert_array_equal(e2m1(packed), np.array([[0.5, 1, -4, -6]], np.float32))
    np.testing.assert_array_equal(powers(np.array([0, 127, 130], np.uint8)), [2.0**-127, 1, 8])
