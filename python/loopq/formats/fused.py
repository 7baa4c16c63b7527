"""Modules of a model's published files that hold several of the model's own, by rows.

A row has codes and scales of its own, so joined rows of one grid are exact.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from loopq.errors import CheckpointError, ConfigError
from loopq.formats.layouts import LAYOUTS, Parts, layout_of
from loopq.layers.layer import QuantizedLayer
from loopq.storage.files import RawTensor

#: One expert among those of a layer. transformers 5 stacks them at loading.
EXPERT = re.compile(r"\.experts\.\d+\.")


def published_parts(config: Mapping[str, Any]) -> Parts:
    """Return the modules of a model's published files that hold several.

    Raises
    ------
    ConfigError
        If the files of the model have no such modules, as far as loopq knows.
    """
    parts = layout_of(config).parts
    if not parts:
        known = ", ".join(name for name, layout in LAYOUTS if layout.parts)
        raise ConfigError(
            f"names: 'published' is for {known}, and config.json says {config.get('model_type')!r}; leave it away"
        )
    return parts


def joined_layers(layers: Mapping[str, QuantizedLayer], parts: Parts) -> dict[str, QuantizedLayer]:
    """Return layers by module, with those of one published module joined.

    Raises
    ------
    CheckpointError
        If one of them is dense, or their grids differ.
    """
    joined = dict(layers)
    for whole, members in _wholes(layers, parts):
        missing = [name for name in members if name not in layers]
        first = layers.get(members[0])
        grids = [layers[name].grid.described() for name in members if name in layers]
        if first is None or missing or any(grid != grids[0] for grid in grids):
            why = f"{missing[0]} is dense" if missing else "their grids differ"
            raise CheckpointError(
                f"{', '.join(members)}: one matrix under published names, but {why}; give them one setting, or leave "
                "the names as they are"
            )
        rows = [joined.pop(name) for name in members]
        stacked: dict[str, Any] = {
            key: np.concatenate([getattr(row, key) for row in rows]) for key in ("codes", "scales")
        }
        zeros = (
            None
            if first.zeros is None
            else np.concatenate([row.zeros for row in rows if row.zeros is not None])
        )
        joined[whole] = dataclasses.replace(first, name=f"{whole}.weight", zeros=zeros, report={}, **stacked)
    return joined


def joined_dense(dense: Mapping[str, RawTensor], parts: Parts) -> dict[str, RawTensor]:
    """Return tensors with the weights of one published module joined where all of them are there."""
    joined = dict(dense)
    modules = [name.removesuffix(".weight") for name in dense if name.endswith(".weight")]
    for whole, members in _wholes(modules, parts):
        names = [f"{member}.weight" for member in members]
        if all(name in joined for name in names):
            joined[f"{whole}.weight"] = _stacked([joined.pop(name) for name in names])
    return joined


def taken_apart(
    layers: Mapping[str, QuantizedLayer], dense: Mapping[str, RawTensor], joined: Iterable[str], parts: Parts
) -> tuple[dict[str, QuantizedLayer], dict[str, RawTensor]]:
    """Undo `joined_layers` and `joined_dense` for modules. Both have names of parameters here."""
    layers, dense = dict(layers), dict(dense)
    for whole in joined:
        kind = next(kind for kind in parts if whole.endswith(f".{kind}"))
        names = [f"{whole.removesuffix(kind)}{part}.weight" for part in parts[kind]]
        if f"{whole}.weight" in dense:
            dense.update(cut(dense.pop(f"{whole}.weight"), names))
        elif f"{whole}.weight" in layers:
            layer = layers.pop(f"{whole}.weight")
            for i, name in enumerate(names):
                rows = slice(i * layer.shape[0] // len(names), (i + 1) * layer.shape[0] // len(names))
                zeros = None if layer.zeros is None else layer.zeros[rows]
                codes, scales = layer.codes[rows], layer.scales[rows]
                layers[name] = dataclasses.replace(layer, name=name, codes=codes, scales=scales, zeros=zeros)
    return layers, dense


def cut(tensor: RawTensor, names: list[str]) -> dict[str, RawTensor]:
    """Cut a tensor into equal parts by rows.

    Raises
    ------
    CheckpointError
        If the rows are no equal parts.
    """
    rows, rest = divmod(tensor.shape[0], len(names))
    if rest:
        raise CheckpointError(
            f"tensor {names[0]!r} and others: {tensor.shape[0]} rows are no {len(names)} parts"
        )
    parts = tensor.data.reshape(len(names), -1)
    shape = (rows, *tensor.shape[1:])
    return {name: RawTensor(tensor.dtype, shape, parts[i]) for i, name in enumerate(names)}


def _wholes(modules: Iterable[str], parts: Parts) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Published modules of which a part is there, each with all its parts."""
    wholes = {}
    for module in modules:
        for kind, members in parts.items():
            stem = next((module.removesuffix(m) for m in members if module.endswith(f".{m}")), None)
            if stem is not None:
                wholes[f"{stem}{kind}"] = tuple(f"{stem}{member}" for member in members)
    return iter(wholes.items())


def _stacked(tensors: list[RawTensor]) -> RawTensor:
    first = tensors[0]
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    return RawTensor(first.dtype, shape, np.concatenate([np.asarray(tensor.data) for tensor in tensors]))
