"""Kinds of grids, one in each file: a new file that registers its class adds a kind."""

from __future__ import annotations

from typing import Any

from loopq.errors import ConfigError
from loopq.layers.grid import Grid
from loopq.settings.registry import Registry

GRIDS: Registry[type[Grid]] = Registry("grid", "loopq.layers.grids")


def grid_of(*, bits: int, group_size: int, symmetric: bool, scale_dtype: str, **more: Any) -> Grid:
    """Return the grid that settings or a file describe.

    Raises
    ------
    ConfigError
        There is no such grid.
    """
    for _, kind in GRIDS:
        if kind.holds(symmetric, more):
            return kind(bits, group_size, scale_dtype, **more)
    what = ", ".join(str(value) for value in more.values())
    raise ConfigError(f"{what} for {bits} bits{'' if symmetric else ', asymmetric'}")
