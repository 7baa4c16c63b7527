"""Kinds of grids, one in each file: a new file that registers its class adds a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopq.errors import ConfigError
from loopq.layers.grid import Grid
from loopq.settings.registry import Registry

GRIDS: Registry[type[Grid]] = Registry("grid", "loopq.layers.grids")
#: What `--levels` can name besides "even": a function of bits, group size and type of the scales.
LEVELS: Registry[Callable[[int, int, str], Grid]] = Registry("levels", "loopq.layers.grids")


def grid_of(*, bits: int, group_size: int, symmetric: bool, scale_dtype: str, **more: Any) -> Grid:
    """Return the grid that settings or a file describe.

    Raises
    ------
    ConfigError
        There is no such grid.
    """
    for _, kind in GRIDS:
        if kind.holds(symmetric, more):
            return kind(bits, group_size, scale_dtype, **kind.given(more))
    what = ", ".join(f"{name} {value}" for name, value in more.items())
    raise ConfigError(f"{what} for {bits} bits{'' if symmetric else ', asymmetric'}")
