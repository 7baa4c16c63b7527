"""Levels of a table: values, fitting, blocks of IQ4_NL and refusals."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grids import grid_of
from loopq.layers.grids.table import UNEVEN, Table, fitted, uneven

TABLE = Table(2, 4, "float32", (-32, -8, 0, 16))


def test_a_code_stands_for_its_level_in_sixteenths_of_the_scale():
    codes = np.array([[-2, -1, 0, 1, 1]], np.int8)
    values = TABLE.dequantize(codes, np.float32([[3.0, -2.0]]))
    assert values.tolist() == [[-6.0, -1.5, 0.0, 3.0, -2.0]]
    assert TABLE.levels.tolist() == [-2.0, -0.5, 0.0, 1.0]
    assert TABLE.limits == (-2, 1)
    assert TABLE.label == "2 bits, uneven levels"


def test_a_table_of_fewer_levels_has_fewer_codes():
    assert Table(2, 4, "float32", (-32, 0, 16)).limits == (-2, 0)


def test_what_a_file_says_gives_the_table_back():
    data = json.loads(json.dumps(TABLE.described()))
    assert data["table"] == [-32, -8, 0, 16]
    assert grid_of(data) == TABLE
    for table in ([-128, 1], [-1, 128], "no", [0.5, -1]):
        with pytest.raises(ConfigError, match="table"):
            grid_of(data | {"table": table})


@pytest.mark.parametrize("bits", UNEVEN)
def test_the_standard_tables_ascend_and_have_both_signs(bits):
    table = uneven(bits, 32, "float16").table
    assert len(table) == 2**bits
    assert list(table) == sorted(set(table))
    assert table[0] < 0 < table[-1]
    assert fitted(bits, 32, "float16").table == table


def test_other_bits_have_no_standard_table():
    with pytest.raises(ConfigError, match="2, 3, 4 bits; got 8"):
        uneven(8, 32, "float16")


def test_a_fitted_table_loses_less_where_the_inputs_have_energy():
    rng = np.random.default_rng(0)
    weight = np.concatenate([rng.exponential(size=(64, 32)), rng.normal(size=(64, 32))], 1).astype(np.float32)
    asked = fitted(2, 32, "float32")

    def error(grid, columns):
        steps = grid.levels * 1.0
        largest = np.abs(weight[:, columns]).max(1, keepdims=True) / np.abs(steps).max()
        # An independent search: the best of both signs of a scale and a few sizes, per row.
        losses = []
        for sign in (-1, 1):
            for size in np.linspace(0.3, 1.1, 9):
                values = (sign * size * largest)[:, :, None] * steps
                losses.append(np.square(weight[:, columns, None] - values).min(2).sum(1))
        return np.min(losses, 0).sum()

    first, last = slice(0, 32), slice(32, 64)
    for columns in (first, last):
        energies = np.full(64, 1e-6)
        energies[columns] = 1.0
        table = asked.fitted(weight, energies, 1)
        assert type(table) is Table
        assert dataclasses.replace(table, table=asked.table) == Table(2, 32, "float32", asked.table)
        assert error(table, columns) < error(asked, columns)
    assert asked.fitted(weight, None, 1) == asked.fitted(weight, np.ones(64), 1)


def test_blocks_of_iq4_nl_hold_a_sixteenth_of_the_scale():
    grid = uneven(4, 32, "float16")
    assert grid.gguf.name == "IQ4_NL"
    assert uneven(3, 32, "float16").gguf is None
    codes = np.arange(-8, 8, dtype=np.int8).repeat(2)[None]
    data = grid.gguf_data(codes, np.float32([[0.75]]), None)[0]
    assert data[:2].copy().view("<f2").tolist() == [0.75 / 16]
    np.testing.assert_array_equal(data[2:] & 15, codes[0, :16] + 8)
    np.testing.assert_array_equal(data[2:] >> 4, codes[0, 16:] + 8)
    with pytest.raises(CheckpointError, match="sixteenths"):
        grid.gguf_data(codes, np.float32([[2.0**-24]]), None)
