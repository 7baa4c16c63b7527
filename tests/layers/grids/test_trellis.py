"""The kind of grid with values that depend on several codes; `test_grids` compares its values with the
definition."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.layers.grids import grid_of
from loopq.layers.grids.trellis import OnTrellis, Trellis

GRID = OnTrellis(2, 4, "float16", Trellis(8, 3))


def test_a_value_depends_on_the_codes_above_it_in_its_stream():
    codes = np.zeros((6, 2), np.int8)
    scales = np.ones((6, 1), np.float32)
    before = GRID.dequantize(codes, scales)
    codes[1, 0] = 1
    changed = GRID.dequantize(codes, scales) != before
    # States of 8 bits reach four codes back, so a change is seen in the whole stream of three, and nowhere else.
    assert changed[:3, 0].all()
    assert not changed[3:].any()
    assert not changed[:, 1].any()


def test_what_a_file_says_gives_the_trellis_back():
    data = json.loads(json.dumps(GRID.described()))
    assert data["trellis"] == {"state_bits": 8, "stream_rows": 3, "function": "1mad"}
    assert grid_of(data) == GRID
    assert GRID.label == "INT2 on a trellis"
    assert not GRID.plain
    assert not GRID.portable


@pytest.mark.parametrize("state_bits", [3, 17])
def test_a_state_has_four_to_sixteen_bits(state_bits):
    with pytest.raises(ConfigError, match="4 to 16"):
        grid_of(GRID.described() | {"trellis": {"state_bits": state_bits, "stream_rows": 3}})


def test_a_state_has_two_more_bits_than_a_code_of_at_most_four():
    assert OnTrellis(4, 4, "float16", Trellis(6, 3)).bits == 4
    for bits, state_bits in ((4, 5), (3, 4), (8, 16)):
        with pytest.raises(ConfigError, match=f"for {bits} bits"):
            OnTrellis(bits, 4, "float16", Trellis(state_bits, 3))
