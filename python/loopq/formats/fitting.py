"""Bring a layer into a shape that a format can hold without changing a number, and undo it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loopq.errors import CheckpointError
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.storage.files import DTYPE_NAMES, float_to_raw

Ragged = Literal["keep", "split"]
RAGGED: tuple[Ragged, ...] = ("keep", "split")


@dataclass(frozen=True)
class StoredLayer:
    """A layer in a format's form with the same numbers, the changes for that, and their cost."""

    layer: QuantizedLayer
    notes: tuple[str, ...] = ()


def is_ragged(layer: QuantizedLayer) -> bool:
    """Whether the last group has fewer columns than the others."""
    return layer.shape[1] % layer.grid.width(layer.shape[1]) != 0


def split(layer: QuantizedLayer, size: int | None = None) -> StoredLayer:
    """Cut groups to `size`, by default the largest that divides in_features and the old size.

    Codes stay and scales are repeated. The weight keeps all its numbers. Only the scales take more space.
    """
    columns = layer.shape[1]
    size = size or math.gcd(columns, layer.grid.group_size)
    if size == layer.grid.group_size:
        return StoredLayer(layer)
    source = np.arange(0, columns, size) // layer.grid.group_size
    cut = dataclasses.replace(
        layer.on_grid(group_size=size),
        scales=np.ascontiguousarray(layer.scales[:, source]),
        zeros=None if layer.zeros is None else np.ascontiguousarray(layer.zeros[:, source]),
    )
    more = cut.n_bytes - layer.n_bytes
    return StoredLayer(cut, (f"groups of {layer.grid.group_size} cut to {size}: {more:+d} bytes",))


def as_channel(layer: QuantizedLayer) -> StoredLayer:
    """Give a row with one short group its usual name: group_size -1 stores the same tensors."""
    if not is_ragged(layer) or layer.scales.shape[1] != 1:
        return StoredLayer(layer)
    note = f"one group of {layer.shape[1]} columns, stored as one scale per row"
    return StoredLayer(layer.on_grid(group_size=-1), (note,))


def in_scale_type(layer: QuantizedLayer, scale_dtype: str, format_name: str) -> QuantizedLayer:
    """Return the layer with scales of type `scale_dtype`, which must hold each of them exactly."""
    if layer.grid.scale_dtype == scale_dtype:
        return layer
    with np.errstate(over="ignore"):
        again = float_to_raw(layer.scales, DTYPE_NAMES[scale_dtype]).float32()
    if not np.array_equal(again, layer.scales):
        row, group = (int(i) for i in np.argwhere(again != layer.scales)[0])
        raise CheckpointError(
            f"layer {layer.name}: {format_name} stores scales in {scale_dtype}, which cannot hold "
            f"scale[{row}, {group}] = {layer.scales[row, group]!r} ({layer.grid.scale_dtype}); "
            f"quantize again with scale_dtype={scale_dtype!r}, so that codes fit the stored scales"
        )
    return layer.on_grid(scale_dtype=scale_dtype)


def restore(layer: QuantizedLayer, settings: LayerSettings, where: str) -> QuantizedLayer:
    """Undo the changes of a format to a layer of these settings. Preparing it again verifies them.

    Raises
    ------
    CheckpointError
        If the tensors cannot represent a layer of these settings.
    """
    (rows, columns), grid = settings.shape, settings.make_grid(where)
    width = layer.grid.width(layer.shape[1])
    first = np.arange(grid.n_groups(columns)) * grid.width(columns) // width
    other = layer.shape != (rows, columns) or layer.scales.shape[1] <= first[-1]
    if other or settings.transform or (type(layer.grid), layer.grid.bits) != (type(grid), grid.bits):
        raise CheckpointError(f"{where}: layer {layer.name}: its tensors are not those of {settings}")
    restored = dataclasses.replace(
        layer.on_grid(group_size=grid.group_size),
        scales=np.ascontiguousarray(layer.scales[:, first]),
        zeros=None if layer.zeros is None else np.ascontiguousarray(layer.zeros[:, first]),
        orientation=settings.orientation,
    )
    return in_scale_type(restored, settings.scale_dtype, where)


def cut_alike(
    layers: Mapping[str, QuantizedLayer], stored: Mapping[str, StoredLayer]
) -> dict[str, StoredLayer]:
    """Cut the groups of all layers with the same group size alike, so that a cut of one of them fits."""
    sizes: dict[int, int] = {}
    for name, layer in layers.items():
        whole, width = layer.grid.group_size, stored[name].layer.grid.group_size
        if width != whole:
            sizes[whole] = math.gcd(sizes.get(whole, whole), width)
    cut = dict(stored)
    for name, layer in layers.items():
        if layer.grid.group_size in sizes:
            again = split(stored[name].layer, sizes[layer.grid.group_size])
            cut[name] = StoredLayer(again.layer, (*stored[name].notes, *again.notes))
    return cut


def costs(layer: QuantizedLayer, policies: Sequence[Ragged]) -> str:
    """Say what each policy for a short last group does to a layer."""
    size = math.gcd(layer.shape[1], layer.grid.group_size)
    times = layer.grid.group_size // size
    texts = {
        "keep": "--ragged keep (ragged='keep') stores it as it is",
        "split": f"--ragged split (ragged='split') stores each scale {times} times, for groups of {size}",
    }
    return "; ".join(texts[p] for p in policies) or "nothing; quantize with a group size that divides it"
