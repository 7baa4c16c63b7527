"""Kinds of grids, one in each file. To add a kind, add a file that registers its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopq.errors import ConfigError
from loopq.layers.grid import Grid
from loopq.settings.registry import Registry

GRIDS: Registry[type[Grid]] = Registry("grid", "loopq.layers.grids")
#: Values of `--levels` besides "even". Each is a function of bits, group size and scale type.
LEVELS: Registry[Callable[[int, int, str], Grid]] = Registry("levels", "loopq.layers.grids")


def grid_of(*, bits: int, group_size: int, symmetric: bool, scale_dtype: str, **more: Any) -> Grid:
    """Return the grid described by settings or a file.

    Raises
    ------
    ConfigError
        No grid has this description.
    """
    for _, kind in GRIDS:
        if kind.holds(symmetric, more):
            return kind(bits, group_size, scale_dtype, **kind.given(more))
    what = ", ".join(f"{name} {value}" for name, value in more.items())
    raise ConfigError(f"{what} for {bits} bits{'' if symmetric else ', asymmetric'}")
