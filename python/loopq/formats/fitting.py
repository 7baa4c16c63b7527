"""What brings a layer into a shape that a format can hold, without changing a number, and what undoes it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loopq.errors import CheckpointError
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.storage.files import DTYPE_NAMES, float_to_raw

Ragged = Literal["keep", "split", "pad"]
RAGGED: tuple[Ragged, ...] = ("keep", "split", "pad")


@dataclass(frozen=True)
class StoredLayer:
    """A layer as a format stores it, standing for the same numbers; what was changed for that, and what it costs."""

    layer: QuantizedLayer
    notes: tuple[str, ...] = ()


def is_ragged(layer: QuantizedLayer) -> bool:
    """Whether the last group has fewer columns than the others."""
    return layer.group_size != -1 and layer.shape[1] % layer.group_size != 0


def split(layer: QuantizedLayer, size: int | None = None) -> StoredLayer:
    """Cut groups to `size`, by default the largest that divides in_features and the old size.

    Codes stay, scales are repeated: the weight stays the same, number by number; only scales take more room.
    """
    columns = layer.shape[1]
    size = size or math.gcd(columns, layer.group_size)
    if size == layer.group_size:
        return StoredLayer(layer)
    source = np.arange(0, columns, size) // layer.group_size
    cut = dataclasses.replace(
        layer,
        group_size=size,
        scales=np.ascontiguousarray(layer.scales[:, source]),
        zeros=None if layer.zeros is None else np.ascontiguousarray(layer.zeros[:, source]),
    )
    more = cut.n_bytes - layer.n_bytes
    return StoredLayer(cut, (f"groups of {layer.group_size} cut to {size}: {more:+d} bytes",))


def as_channel(layer: QuantizedLayer) -> StoredLayer:
    """Call a row that is one short group by its name: group_size -1 stores the same tensors."""
    if not is_ragged(layer) or layer.scales.shape[1] != 1:
        return StoredLayer(layer)
    note = f"one group of {layer.shape[1]} columns, stored as one scale per row"
    return StoredLayer(dataclasses.replace(layer, group_size=-1), (note,))


def in_scale_type(layer: QuantizedLayer, scale_dtype: str, format_name: str) -> QuantizedLayer:
    """Return the layer with scales called `scale_dtype`, which must hold each of them exactly."""
    if layer.scale_dtype == scale_dtype:
        return layer
    with np.errstate(over="ignore"):
        again = float_to_raw(layer.scales, DTYPE_NAMES[scale_dtype]).float32()
    if not np.array_equal(again, layer.scales):
        row, group = (int(i) for i in np.argwhere(again != layer.scales)[0])
        raise CheckpointError(
            f"layer {layer.name}: {format_name} stores scales in {scale_dtype}, which cannot hold "
            f"scale[{row}, {group}] = {layer.scales[row, group]!r} ({layer.scale_dtype}); "
            f"quantize again with scale_dtype={scale_dtype!r}, so that codes fit the stored scales"
        )
    return dataclasses.replace(layer, scale_dtype=scale_dtype)


def restore(layer: QuantizedLayer, settings: LayerSettings, where: str) -> QuantizedLayer:
    """Undo what a format did to a layer of these settings; that it did just that, preparing it again tells.

    Raises
    ------
    CheckpointError
        The tensors cannot stand for a layer of these settings.
    """
    (rows, columns), group = settings.shape, settings.group_size
    n_groups = 1 if group == -1 else -(-columns // group)
    width = layer.shape[1] if layer.group_size == -1 else layer.group_size
    first = np.arange(n_groups) * group // width if n_groups > 1 else np.zeros(1, np.int64)
    smaller = layer.shape[0] < rows or layer.shape[1] < columns or layer.scales.shape[1] <= first[-1]
    if (
        smaller
        or settings.transform
        or settings.trellis
        or (layer.bits, layer.symmetric) != (settings.bits, settings.symmetric)
    ):
        raise CheckpointError(f"{where}: layer {layer.name}: its tensors are not those of {settings}")
    restored = dataclasses.replace(
        layer,
        group_size=group,
        codes=np.ascontiguousarray(layer.codes[:rows, :columns]),
        scales=np.ascontiguousarray(layer.scales[:rows, first]),
        zeros=None if layer.zeros is None else np.ascontiguousarray(layer.zeros[:rows, first]),
        orientation=settings.orientation,
    )
    return in_scale_type(restored, settings.scale_dtype, where)
