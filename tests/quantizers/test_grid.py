"""Settings of a grid: which grid they give, and which they refuse."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.layers.grids.asymmetric import Asymmetric
from loopq.layers.grids.fp4 import MXFP4
from loopq.layers.grids.integer import Integer
from loopq.layers.grids.table import Fitted, uneven
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.grid import GridSettings


@pytest.mark.parametrize(
    ("settings", "grid"),
    [
        (GridSettings(), Integer(4, 128, "float16")),
        (GridSettings(3, 32, scale_dtype="float32"), Integer(3, 32, "float32")),
        (GridSettings(2, -1, symmetric=False), Asymmetric(2, -1, "float16")),
        (GridSettings(4, 32, levels="uneven"), uneven(4, 32, "float16")),
    ],
)
def test_settings_give_their_grid(settings, grid):
    assert settings.make() == grid
    assert type(settings.make()) is type(grid)


def test_some_levels_bring_bits_groups_or_a_fit():
    assert isinstance(GridSettings(levels="fitted").make(), Fitted)
    assert not isinstance(GridSettings(levels="uneven").make(), Fitted)
    assert GridSettings(4, 32, levels="mxfp4").make() == MXFP4(4, 32, "float8_e8m0fnu")
    assert GridSettings(levels="q4_k").make().group_size == 32


def test_auto_is_uneven_where_a_table_exists():
    chosen = {
        (bits, s): LayerConfig.of(bits=bits, symmetric=s).decided().grid.levels
        for bits in (2, 4, 8)
        for s in (True, False)
    }
    assert chosen == {
        (2, True): "uneven", (4, True): "uneven", (8, True): "even",
        (2, False): "even", (4, False): "even", (8, False): "even",
    }  # fmt: skip
    for given in ("even", "fitted"):
        assert LayerConfig.of(levels=given).decided().grid.levels == given


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"group_size": 0}, r"group_size must be -1 \(per channel\) or at least 1; got 0"),
        ({"group_size": -2}, "got -2"),
        ({"levels": "uneven", "symmetric": False}, "have no zero points: leave --set symmetric=false out"),
        ({"levels": "uneven", "bits": 8}, "2, 3, 4 bits; got 8"),
        ({"levels": "q4_k", "group_size": 64}, "groups of 32; got group_size 64: leave --group-size away"),
        ({"levels": "q4_k", "bits": 8}, "has 4 bits and groups of 32; got bits 8: leave --bits away"),
        ({"levels": "odd"}, "unknown levels 'odd'"),
        ({"scale_bits": 0}, "between 1 and 11, the significant bits of float16; got 0"),
        ({"scale_bits": 12}, "between 1 and 11"),
        ({"scale_bits": 9, "scale_dtype": "bfloat16"}, "between 1 and 8"),
        ({"scale_bits": 25, "scale_dtype": "float32"}, "between 1 and 24"),
    ],
)
def test_other_settings_are_refused(given, match):
    with pytest.raises(ConfigError, match=match):
        GridSettings(**given)


def test_ends_of_what_is_allowed():
    assert GridSettings(group_size=1).make().group_size == 1
    assert GridSettings(scale_bits=1).scale_bits == 1
    assert GridSettings(scale_bits=11).scale_bits == 11
