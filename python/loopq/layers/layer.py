"""One quantized layer: its codes, its scales, and a report of its quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grid import ALL_BITS, BITS, Grid
from loopq.layers.grids import grid_of
from loopq.layers.reader import TensorReader
from loopq.layers.transforms import Transform, from_description
from loopq.storage.files import ITEM_SIZE, RawTensor, float_to_raw
from loopq.storage.schema import Allowed, Count, Name, Object, Positive, checked, shown
from loopq.storage.weights import Orientation, as_stored, stored_shape

Bits = Annotated[int, Allowed(", ".join(map(str, BITS)), BITS.__contains__)]
AnyBits = Annotated[int, Allowed(", ".join(map(str, ALL_BITS)), ALL_BITS.__contains__)]
GroupSize = Annotated[int, Allowed("-1 or 1 to 2147483647", lambda n: n == -1 or 0 < n < 1 << 31)]


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """A layer's entry in an index. `QuantizedLayer` describes the fields."""

    name: Name
    bits: AnyBits
    group_size: GroupSize
    symmetric: bool
    scale_dtype: str
    #: None in files of before it was stored.
    kind: Name | None = None
    orientation: Orientation = "out_in"
    shape: tuple[Positive, Positive]
    transform: Object | None = None
    #: Further fields of the grid's kind.
    more: Object = field(default_factory=dict, metadata={"others": True})

    def __post_init__(self) -> None:
        """Reject a kernel that does not fit the shape."""
        stored_shape(self.shape, self.orientation)

    @property
    def module(self) -> str:
        """Name of the module that holds the weight."""
        return self.name.removesuffix(".weight")

    def make_grid(self, where: object) -> Grid:
        """Return the layer's grid.

        Raises
        ------
        CheckpointError
            There is no grid with these settings.
        """
        try:
            fields = ("kind", "bits", "group_size", "symmetric", "scale_dtype")
            return grid_of({name: getattr(self, name) for name in fields} | self.more)
        except ConfigError as cause:
            raise CheckpointError(f"{where}: layer {self.name}: {cause}") from None


@dataclass(frozen=True)
class _Rotation:
    type: Literal["rotation"]
    kind: Literal["signed", "random", "hadamard"]
    dim: Positive
    block: Positive
    seed: Count
    made: dict[str, str]


@dataclass(frozen=True)
class QuantizedLayer:
    """A weight matrix on a grid.

    Parameters
    ----------
    name : str
        Name of the parameter ("transformer.adapter.weight").
    grid : Grid
        Grid of the codes. It determines their values.
    codes : ndarray, int8 or uint8, shape (out_features, in_features)
        Integer codes.
    scales : ndarray, float32, shape (out_features, n_groups)
        Scales. They are already rounded to the grid's `scale_dtype`.
    zeros : ndarray, uint8 or float32, shape (out_features, n_groups), or None
        Zero points of an asymmetric grid, or offsets that a GGUF type adds to the values of a group.
    orientation : {"out_in", "in_out", "table", "conv", "conv3", "conv3x3", ...}
        Storage of the weight in the model (`loopq.storage.weights.Orientation`).
    report : mapping of str to Any
        Settings, results and cost of the quantization.
    transform : Transform, optional
        Input basis of the codes (`loopq.layers.transforms`). Only the native format holds it.
    """

    name: str
    grid: Grid
    codes: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[Any] | None
    orientation: str = "out_in"
    report: Mapping[str, Any] = field(default_factory=dict)
    transform: Transform | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weight for the layer's plain input, float32, shape (out_features, in_features)."""
        values = self.stored_values()
        return values if self.transform is None else self.transform.unfold(values)

    def stored_values(self) -> NDArray[np.float32]:
        """Return the weight for the transformed input. Without a transform this is the plain input."""
        return self.grid.dequantize(self.codes, self.scales, self.zeros)

    @property
    def n_bytes(self) -> int:
        """Bytes of `tensors` without the shape, counted without packing."""
        arrays = {} if self.transform is None else self.transform.arrays()
        return self.grid.n_bytes(*self.shape) + sum(ITEM_SIZE["F16"] * a.size for a in arrays.values())

    @property
    def module(self) -> str:
        """Name of the module that holds the weight."""
        return self.name.removesuffix(".weight")

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model's storage."""
        return stored_shape(self.shape, self.orientation)

    def in_model_orientation(self) -> NDArray[np.float32]:
        """Return the dequantized weight in the model's storage order, float32, C-contiguous."""
        return as_stored(self.dequantize(), self.orientation)

    def tensors(self) -> dict[str, RawTensor]:
        """Return the stored tensors. Names follow compressed-tensors; docs/formats/checkpoint.md has the layout."""
        out = self.grid.tensors(self.codes, self.scales, self.zeros)
        if self.transform is not None:
            # They are already rounded to float16, so this loses nothing.
            out |= {name: float_to_raw(a, "F16") for name, a in self.transform.arrays().items()}
        return {f"{self.module}.{key}": tensor for key, tensor in out.items()}

    def settings(self) -> dict[str, Any]:
        """Return plain data that, with the tensors, restores the layer."""
        transform = {} if self.transform is None else {"transform": self.transform.describe()}
        return {
            "name": self.name,
            **self.grid.described(),
            "orientation": self.orientation,
            "shape": list(self.shape),
            **transform,
        }

    @classmethod
    def from_tensors(
        cls, settings: LayerSettings, reader: TensorReader, report: Mapping[str, Any]
    ) -> QuantizedLayer:
        """Rebuild a layer from its stored tensors, with checks of every shape, dtype and code range.

        Raises
        ------
        CheckpointError
            The message names the file and the tensor.
        """
        (rows, columns), module = settings.shape, settings.module
        grid = settings.make_grid(reader.where)
        shape = reader.get(f"{module}.weight_shape", ("I64", "I32"), (2,)).array().tolist()
        if shape != [rows, columns]:
            stated = f"'{module}.weight_shape' says {shape}"
            raise CheckpointError(f"{reader.where}: tensor {stated}, expected {[rows, columns]}")
        codes, scales, zeros = grid.read(reader, module, rows, columns)
        transform = _transform(settings, reader)
        return cls(settings.name, grid, codes, scales, zeros, settings.orientation, dict(report), transform)

    def same_as(self, other: QuantizedLayer) -> bool:
        """Whether codes, scales and zero points are equal, bit for bit."""
        zeros = (self.zeros is None) == (other.zeros is None) and (
            self.zeros is None or other.zeros is None or np.array_equal(self.zeros, other.zeros)
        )
        return (
            np.array_equal(self.codes, other.codes)
            and np.array_equal(self.scales, other.scales)
            and zeros
            and _values_of(self.grid) == _values_of(other.grid)
            and _same_transform(self.transform, other.transform)
        )

    def on_grid(self, **changes: Any) -> QuantizedLayer:
        """Return the layer with another group size or scale type of its grid. Its arrays must already fit."""
        return dataclasses.replace(self, grid=dataclasses.replace(self.grid, **changes))

    def with_report(self, **more: Any) -> QuantizedLayer:
        """Return the layer with additional report entries."""
        return dataclasses.replace(self, report={**self.report, **more})

    def with_transform(self, transform: Transform) -> QuantizedLayer:
        """Return the layer for another basis of its input."""
        return dataclasses.replace(self, transform=transform)


class Dequantized(Mapping[str, NDArray[np.float32]]):
    """Weights of layers in the model's orientation. Each is dequantized on access."""

    def __init__(self, layers: Mapping[str, QuantizedLayer]) -> None:
        self._layers = layers

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._layers[name].in_model_orientation()

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _transform(settings: LayerSettings, reader: TensorReader) -> Transform | None:
    """Rebuild a layer's input transform and check it against its description."""
    description, arrays = settings.transform, {}
    if description is None:
        return None
    columns = settings.shape[1]
    where = f"{reader.where}: layer {settings.name}: transform"
    if description == {"type": "channel_scale"}:
        name = f"{settings.module}.input_scale"
        arrays["input_scale"] = reader.scales(name, (columns,), ["F16"])
    else:
        # A rotation is rebuilt and takes the square of its block in memory.
        rotation = checked(_Rotation, description, where)
        if rotation.dim != columns or rotation.block > columns:
            raise CheckpointError(f"{where}: {shown(description)} for a layer of {columns} inputs")
    transform = from_description(description, arrays)
    if transform.describe() != description:
        raise CheckpointError(
            f"{where}: {shown(description)}; this loopq makes another: {shown(transform.describe())}"
        )
    return transform


def _values_of(grid: Grid) -> dict[str, Any]:
    """A grid without its groups and storage of scales: with the scales this determines all values."""
    return {k: v for k, v in grid.described().items() if k not in ("group_size", "scale_dtype")}


def _same_transform(a: Transform | None, b: Transform | None) -> bool:
    if a is None or b is None:
        return a is b
    mine, theirs = a.arrays(), b.arrays()
    same = mine.keys() == theirs.keys() and all(np.array_equal(mine[k], theirs[k]) for k in mine)
    return same and a.describe() == b.describe()
