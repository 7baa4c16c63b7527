"""Kinds of grids, one in each file. To add a kind, add a file that registers its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loopq.errors import ConfigError
from loopq.layers.grid import Grid
from loopq.settings.registry import Registry
from loopq.storage.schema import Object, checked, shown

GRIDS: Registry[type[Grid]] = Registry("grid", "loopq.layers.grids")
#: Values of `--levels` besides "even". Each is a function of bits, group size and scale type.
LEVELS: Registry[Callable[[int, int, str], Grid]] = Registry("levels", "loopq.layers.grids")

#: Files of before the kind was stored: the one entry that a kind had, its kind, and the field that the entry is now.
#: Without a field the entry holds the fields.
_WITHOUT_KIND = {
    "levels": ("table", "table"), "trellis": ("trellis", "trellis"), "gguf": ("gguf", "block"),
    "nvfp4": ("nvfp4", None), "mxfp4": ("mxfp4", None),
}  # fmt: skip


def even(*, bits: int, group_size: int, symmetric: bool, scale_dtype: str) -> Grid:
    """Return the grid of whole numbers, with zero points if it is not symmetric."""
    return GRIDS.get(_even(symmetric))(bits, group_size, scale_dtype)


def grid_of(description: Mapping[str, Any]) -> Grid:
    """Return the grid of a description (`Grid.described`), which may come from a file.

    Raises
    ------
    ConfigError
        No grid has this description.
    """
    fields = dict(description)
    symmetric, kind = fields.pop("symmetric"), fields.pop("kind", None)
    if kind is None:
        kind, fields = _with_kind(symmetric, fields)
    grid: Grid = checked(GRIDS.get(kind), fields, f"grid {kind}", ConfigError)
    if grid.symmetric != symmetric:
        raise ConfigError(f"grid {kind}: symmetric is {symmetric}; allowed: {grid.symmetric}")
    return grid


def without_kind(description: Mapping[str, Any]) -> Object:
    """Return a description as it was before the kind was stored. A kind that came later keeps it.

    config.json and `loopq_export.json` have this form, so that their bytes stay and older versions read them.
    """
    fields = dict(description)
    kind = fields.pop("kind")
    if kind == _even(fields["symmetric"]):
        return fields
    for name, (old, field) in _WITHOUT_KIND.items():
        if old == kind:
            more = {
                key: fields.pop(key) for key in _more(f.name for f in dataclasses.fields(GRIDS.get(kind)))
            }
            return fields | {name: more if field is None else more[field]}
    return fields | {"kind": kind}


def _with_kind(symmetric: bool, fields: Object) -> tuple[str, Object]:
    """Return kind and fields of a description without a kind."""
    more = {name: fields[name] for name in _more(fields)}
    if not more:
        return _even(symmetric), fields
    name, value = next(iter(more.items()))
    if len(more) > 1 or name not in _WITHOUT_KIND:
        raise ConfigError(
            f"kind is missing, and no grid has {shown(more)}; known: {', '.join(GRIDS.names())}"
        )
    kind, field = _WITHOUT_KIND[name]
    del fields[name]
    return kind, fields | (checked(Object, value, name, ConfigError) if field is None else {field: value})


def _even(symmetric: bool) -> str:
    return "integer" if symmetric else "asymmetric"


def _more(names: Iterable[str]) -> list[str]:
    """Names beyond the fields of all grids."""
    return [name for name in names if name not in {f.name for f in dataclasses.fields(Grid)}]
