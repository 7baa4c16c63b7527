"""Base of the formats of other tools, and what brings a layer into a shape that a format can hold."""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from loopq.errors import CheckpointError, ConfigError
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import DTYPE_NAMES, RawTensor, float_to_raw
from loopq.storage.schema import shown

Ragged = Literal["keep", "split", "pad"]
RAGGED: tuple[Ragged, ...] = ("keep", "split", "pad")


@dataclass(frozen=True)
class StoredLayer:
    """A layer as a format stores it, standing for the same numbers; what was changed for that, and what it costs."""

    layer: QuantizedLayer
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Export:
    """All that a format needs to know to write its config.

    Layers as the format stores them, by module (a tied weight stands under each of its modules), modules that hold a
    matrix which stays as it is, and further facts: version of loopq, damping.
    """

    layers: Mapping[str, QuantizedLayer]
    dense: tuple[str, ...]
    report: Mapping[str, Any] = field(default_factory=dict)


class Format(ABC):
    """A checkpoint format of another tool.

    Attributes
    ----------
    name : str
        Name in the registry and on the command line.
    ragged : tuple of {"keep", "split", "pad"}
        Policies for a last group that is shorter than the others: stored as it is, cut in smaller groups of
        the same scale, or filled up with zeros.
    reason : str
        Why the other policies cannot be had.
    one_group_size : bool
        Some readers know one group size for the whole file: where one layer is split, all of its group size are.
    """

    name: ClassVar[str]
    ragged: ClassVar[tuple[Ragged, ...]]
    reason: ClassVar[str]
    one_group_size: ClassVar[bool] = False

    @abstractmethod
    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is of this format."""

    @abstractmethod
    def prepare(self, layer: QuantizedLayer, ragged: Ragged | None) -> StoredLayer:
        """Bring a layer into the shape that the format holds, without changing a number.

        Raises
        ------
        CheckpointError
            The format cannot hold the layer; the message says why and what can.
        """

    @abstractmethod
    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """Return the stored tensors of a prepared layer."""

    @abstractmethod
    def config(self, export: Export) -> dict[str, Any]:
        """Return the `quantization_config`."""

    def remarks(self, export: Export) -> tuple[str, ...]:
        """What readers of the format are known not to do with such a file, in sentences; empty where nothing is."""
        return ()

    @abstractmethod
    def modules(self, names: Sequence[str]) -> list[str]:
        """Return the modules that are quantized, told by the tensor names of a file."""

    @abstractmethod
    def read(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer."""


def matches(pattern: str, module: str, where: str) -> bool:
    """Whether a regular expression of a file matches the beginning of a module's name.

    A search can take time exponential in the name where what is repeated is a group, and a power of the repeats else;
    both are limited, since a file may come from anyone.
    """
    repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    try:
        if len(pattern) > 2000 or repeats > 4 or re.search(r"(?<!\\)\)[*+{]", pattern):
            raise re.error("more than 4 repeats, a repeated group, or more than 2000 characters")
        return re.match(pattern, module) is not None
    except (re.error, OverflowError, RecursionError) as cause:
        raise CheckpointError(f"{where}: pattern {shown(pattern)}: {cause}") from None


def is_ragged(layer: QuantizedLayer) -> bool:
    """Whether the last group has fewer columns than the others."""
    return layer.shape[1] % layer.grid.width(layer.shape[1]) != 0


def choose(layer: QuantizedLayer, ragged: Ragged | None, target: Format) -> Ragged | None:
    """Return the policy for a layer: None where it needs none.

    Raises
    ------
    CheckpointError
        The layer is ragged and no policy was chosen, or the format cannot have the one that was.
    """
    if not is_ragged(layer):
        return None
    columns = layer.shape[1]
    last = columns % layer.grid.group_size
    what = (
        f"layer {layer.name}: the last of its groups has {last} of {layer.grid.group_size} columns "
        f"(in_features {columns})"
    )
    if ragged is None:
        raise CheckpointError(f"{what}; choose what to do with it: {_costs(layer, target.ragged)}")
    if ragged not in RAGGED:
        raise ConfigError(f"ragged must be one of {', '.join(RAGGED)}; got {ragged!r}")
    if ragged not in target.ragged:
        raise CheckpointError(
            f"{what}; {target.name} cannot {ragged} it: {target.reason}; it can: {_costs(layer, target.ragged)}"
        )
    return ragged


def _costs(layer: QuantizedLayer, policies: Sequence[Ragged]) -> str:
    size = math.gcd(layer.shape[1], layer.grid.group_size)
    times = layer.grid.group_size // size
    texts = {
        "keep": "--ragged keep (ragged='keep') stores it as it is",
        "split": f"--ragged split (ragged='split') stores each scale {times} times, for groups of {size}",
        "pad": "--ragged pad (ragged='pad') fills it up with zero codes",
    }
    return "; ".join(texts[p] for p in policies) or "nothing; quantize with a group size that divides it"


def split(layer: QuantizedLayer, size: int | None = None) -> StoredLayer:
    """Cut groups to `size`, by default the largest that divides in_features and the old size.

    Codes stay, scales are repeated: the weight stays the same, number by number; only scales take more room.
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


def prepare_all(
    target: Format, layers: Mapping[str, QuantizedLayer], ragged: Ragged | None
) -> dict[str, StoredLayer]:
    """Bring the layers of a checkpoint into the shape that a format holds.

    Where a format has one group size for a file, the groups of all layers that had one size are cut alike.
    """
    stored = {name: target.prepare(layer, ragged) for name, layer in layers.items()}
    if not target.one_group_size:
        return stored
    sizes: dict[int, int] = {}
    for name, layer in layers.items():
        size = stored[name].layer.grid.group_size
        if size != layer.grid.group_size:
            sizes[layer.grid.group_size] = math.gcd(
                sizes.get(layer.grid.group_size, layer.grid.group_size), size
            )
    for name, layer in layers.items():
        if layer.grid.group_size in sizes:
            again = split(stored[name].layer, sizes[layer.grid.group_size])
            stored[name] = StoredLayer(again.layer, (*stored[name].notes, *again.notes))
    return stored


def as_channel(layer: QuantizedLayer) -> StoredLayer:
    """Call a row that is one short group by its name: group_size -1 stores the same tensors."""
    if not is_ragged(layer) or layer.scales.shape[1] != 1:
        return StoredLayer(layer)
    note = f"one group of {layer.shape[1]} columns, stored as one scale per row"
    return StoredLayer(layer.on_grid(group_size=-1), (note,))


def in_scale_type(layer: QuantizedLayer, scale_dtype: str, format_name: str) -> QuantizedLayer:
    """Return the layer with scales called `scale_dtype`, which must hold each of them exactly."""
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
    """Undo what `Format.prepare` did to a layer of these settings; that it did just that, preparing it again tells.

    Raises
    ------
    CheckpointError
        The tensors cannot stand for a layer of these settings.
    """
    (rows, columns), grid = settings.shape, settings.grid(where)
    width = layer.grid.width(layer.shape[1])
    first = np.arange(grid.n_groups(columns)) * grid.width(columns) // width
    smaller = layer.shape[0] < rows or layer.shape[1] < columns or layer.scales.shape[1] <= first[-1]
    if smaller or settings.transform or (type(layer.grid), layer.grid.bits) != (type(grid), grid.bits):
        raise CheckpointError(f"{where}: layer {layer.name}: its tensors are not those of {settings}")
    restored = dataclasses.replace(
        layer.on_grid(group_size=grid.group_size),
        codes=np.ascontiguousarray(layer.codes[:rows, :columns]),
        scales=np.ascontiguousarray(layer.scales[:rows, first]),
        zeros=None if layer.zeros is None else np.ascontiguousarray(layer.zeros[:rows, first]),
        orientation=settings.orientation,
    )
    return in_scale_type(restored, settings.scale_dtype, where)
