"""Unsigned integers with zero points: values, storage and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grids.asymmetric import Asymmetric
from loopq.layers.reader import TensorReader

GRID = Asymmetric(3, 4, "float32")
CODES = np.array([[0, 7, 3, 1, 2], [6, 5, 4, 3, 0]], np.uint8)
SCALES = np.float32([[0.5, 2.0], [1.0, -3.0]])
ZEROS = np.array([[3, 7], [0, 5]], np.uint8)


def test_a_value_is_code_minus_zero_point_times_scale():
    expected = [[-1.5, 2.0, 0.0, -1.0, -10.0], [6.0, 5.0, 4.0, 3.0, 15.0]]
    assert GRID.dequantize(CODES, SCALES, ZEROS).tolist() == expected
    assert GRID.limits == (0, 7)
    assert GRID.dtype is np.uint8
    assert GRID.label == "INT3, asymmetric"


def test_zero_points_of_a_group_are_a_column_of_words():
    tensors = {f"a.{name}": tensor for name, tensor in GRID.tensors(CODES, SCALES, ZEROS).items()}
    packed = tensors["a.weight_zero_point"].array()
    # Row 0 in the lowest three bits, row 1 above.
    assert packed.tolist() == [[3 | 0 << 3, 7 | 5 << 3]]
    codes, scales, zeros = GRID.read(TensorReader("f", tensors), "a", 2, 5)
    np.testing.assert_array_equal(codes, CODES)
    np.testing.assert_array_equal(scales, SCALES)
    np.testing.assert_array_equal(zeros, ZEROS)
    stored = sum(t.data.size for name, t in tensors.items() if name != "a.weight_shape")
    assert GRID.n_bytes(2, 5) == stored
    del tensors["a.weight_zero_point"]
    with pytest.raises(CheckpointError, match=r"a\.weight_zero_point"):
        GRID.read(TensorReader("f", tensors), "a", 2, 5)


@pytest.mark.parametrize("zeros", [None, ZEROS[:, :1], ZEROS.astype(np.int8)])
def test_other_zero_points_are_refused(zeros):
    for refused in (lambda: GRID.check(CODES, SCALES, zeros), lambda: GRID.tensors(CODES, SCALES, zeros)):
        with pytest.raises(ConfigError, match=r"zero points are .*; expected uint8 \(2, 2\)"):
            refused()
