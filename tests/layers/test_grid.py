"""The grid of the codes."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.layers.grids.integer import Integer
from loopq.quantizers.grid import GridSettings


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8; got 5"),
        ({"group_size": 0}, r"group_size must be -1 \(per channel\) or at least 1; got 0"),
        ({"group_size": "16"}, "group_size must be a whole number; got '16'"),
        ({"symmetric": 1}, "symmetric must be true or false; got 1"),
        ({"scale_dtype": "int8"}, "scale_dtype must be one of float32, float16, bfloat16"),
        ({"scale_bits": 0}, "scale_bits must be between 1 and 11, the significant bits of float16; got 0"),
        ({"scale_bits": 9, "scale_dtype": "bfloat16"}, "scale_bits must be between 1 and 8"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(ConfigError, match=match):
        GridSettings(**changes)


def test_groups():
    assert [Integer(4, g, "float16").n_groups(100) for g in (-1, 1, 32, 100, 128)] == [1, 100, 4, 1, 1]
    assert [Integer(4, g, "float16").width(100) for g in (-1, 32)] == [100, 32]
