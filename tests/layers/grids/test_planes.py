"""Bytes of GGUF blocks hold each bit of each number where llama.cpp reads it."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.layers.grids.planes import Half, Plane, Sixes

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("plane", "count"),
    [(Plane(0, 4, 64), 256), (Plane(4, 1, 256), 256), (Plane(4, 2, 128), 256), (Plane(0, 4, 32), 32)],
)
def test_numbers_of_a_byte_are_a_fraction_of_a_chunk_apart(plane, count):
    numbers = RNG.integers(0, 64, (3, count), dtype=np.uint8)
    packed = plane.pack(numbers)
    assert packed.shape == (3, plane.size(count)) == (3, count * plane.bits // 8)
    parts = 8 // plane.bits
    step = plane.chunk // parts
    for n in range(count):
        chunk, within = divmod(n, plane.chunk)
        part, place = divmod(within, step)
        unpacked = packed[:, chunk * step + place] >> part * plane.bits & 2**plane.bits - 1
        np.testing.assert_array_equal(unpacked, numbers[:, n] >> plane.shift & 2**plane.bits - 1)
    kept = 2**plane.bits - 1 << plane.shift
    np.testing.assert_array_equal(plane.unpack(packed), numbers & kept)


def test_six_bits_of_eight_scales_and_offsets():
    numbers = RNG.integers(0, 64, (5, 16), dtype=np.uint8)
    packed = Sixes().pack(numbers)
    assert packed.shape == (5, 12) == (5, Sixes().size(16))
    scales, offsets = numbers[:, :8], numbers[:, 8:]
    # As `get_scale_min_k4` of llama.cpp reads them.
    for j in range(4):
        np.testing.assert_array_equal(packed[:, j] & 63, scales[:, j])
        np.testing.assert_array_equal(packed[:, j + 4] & 63, offsets[:, j])
        np.testing.assert_array_equal(packed[:, j + 8] & 15 | packed[:, j] >> 6 << 4, scales[:, j + 4])
        np.testing.assert_array_equal(packed[:, j + 8] >> 4 | packed[:, j + 4] >> 6 << 4, offsets[:, j + 4])
    np.testing.assert_array_equal(Sixes().unpack(packed), numbers)


def test_a_half_is_two_bytes():
    numbers = np.float32([0.1, -2.5, 0.0])
    packed = Half().pack(numbers)
    assert packed.shape == (3, Half().size(1)) == (3, 2)
    np.testing.assert_array_equal(packed.view("<f2").ravel(), numbers.astype(np.float16))
    np.testing.assert_array_equal(Half().unpack(packed), numbers.astype(np.float16)[:, None])
