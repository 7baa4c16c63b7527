"""What a format of another tool is to loopq, and how a layer is brought into a shape that it can hold."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from loopq.checkpoint.files import RawTensor, float_to_raw
from loopq.checkpoint.layer import QuantizedLayer
from loopq.errors import CheckpointError, ConfigError

Ragged = Literal["keep", "split", "pad"]
RAGGED: tuple[Ragged, ...] = ("keep", "split", "pad")
_FLOATS = ("F16", "BF16", "F32")
_SCALE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Shelf:
    """The tensors of a file, handed out only as they are expected.

    Parameters
    ----------
    where : str
        File or folder, for messages.
    tensors : mapping of str to RawTensor
        Everything there is.
    """

    where: str
    tensors: Mapping[str, RawTensor]

    def get(self, name: str, dtypes: Sequence[str], shape: tuple[int | None, ...]) -> RawTensor:
        """Return a tensor; None in `shape` lets that dimension be any.

        Raises
        ------
        CheckpointError
            It is missing, or of another type or shape.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.where}: tensor {name!r} is missing")
        tensor = self.tensors[name]
        fits = len(tensor.shape) == len(shape) and all(
            want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype not in dtypes or not fits:
            wanted = [n if n is not None else "any" for n in shape]
            raise CheckpointError(
                f"{self.where}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; "
                f"expected {' or '.join(dtypes)} {wanted}"
            )
        return tensor

    def scales(self, name: str, shape: tuple[int | None, ...]) -> tuple[NDArray[np.float32], str]:
        """Return scales and their stored type ("float16"); they must be finite and not zero."""
        tensor = self.get(name, _FLOATS, shape)
        values = tensor.float32()
        if not np.isfinite(values).all() or (values == 0).any():
            raise CheckpointError(f"{self.where}: tensor {name!r} holds a scale that is zero or not finite")
        return values, _SCALE_DTYPES[tensor.dtype]


@dataclass(frozen=True)
class Fitted:
    """A layer in the shape that a format can hold, standing for the same numbers.

    Parameters
    ----------
    layer : QuantizedLayer
        With other groups or padded, where that was asked for.
    notes : tuple of str
        What was changed and what it costs, for the report.
    """

    layer: QuantizedLayer
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Export:
    """All that a format needs to know to write its config.

    Parameters
    ----------
    layers : mapping of str to QuantizedLayer
        Fitted layers by module name; a tied weight stands under each of its modules.
    dense : tuple of str
        Names of modules that hold a matrix which stays as it is.
    report : mapping of str to Any
        Further facts: version of loopq, damping.
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
    def fit(self, layer: QuantizedLayer, ragged: Ragged | None) -> Fitted:
        """Bring a layer into the shape that the format holds, without changing a number.

        Raises
        ------
        CheckpointError
            The format cannot hold the layer; the message says why and what can.
        """

    @abstractmethod
    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """Return the stored tensors of a fitted layer."""

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
    def read(self, module: str, shelf: Shelf, config: Mapping[str, Any]) -> tuple[QuantizedLayer, list[str]]:
        """Read one layer; return it with the names of the tensors it was read from."""


def is_ragged(layer: QuantizedLayer) -> bool:
    """Whether the last group has fewer columns than the others."""
    return layer.group_size != -1 and layer.shape[1] % layer.group_size != 0


def choose(layer: QuantizedLayer, ragged: Ragged | None, form: Format) -> Ragged | None:
    """Return the policy for a layer: None where it needs none.

    Raises
    ------
    CheckpointError
        The layer is ragged and no policy was chosen, or the format cannot have the one that was.
    """
    if not is_ragged(layer):
        return None
    columns = layer.shape[1]
    last = columns % layer.group_size
    what = (
        f"layer {layer.name}: the last of its groups has {last} of {layer.group_size} columns "
        f"(in_features {columns})"
    )
    if ragged is None:
        raise CheckpointError(f"{what}; choose what to do with it: {_costs(layer, form.ragged)}")
    if ragged not in RAGGED:
        raise ConfigError(f"ragged must be one of {', '.join(RAGGED)}; got {ragged!r}")
    if ragged not in form.ragged:
        raise CheckpointError(
            f"{what}; {form.name} cannot {ragged} it: {form.reason}; it can: {_costs(layer, form.ragged)}"
        )
    return ragged


def _costs(layer: QuantizedLayer, policies: Sequence[Ragged]) -> str:
    size = math.gcd(layer.shape[1], layer.group_size)
    texts = {
        "keep": "--ragged keep (ragged='keep') stores it as it is",
        "split": f"--ragged split (ragged='split') stores each scale {layer.group_size // size} times, for groups of "
        f"{size}",
        "pad": "--ragged pad (ragged='pad') fills it up with zero codes",
    }
    return "; ".join(texts[p] for p in policies) or "nothing; quantize with a group size that divides it"


def split(layer: QuantizedLayer, size: int | None = None) -> Fitted:
    """Cut groups to a size that divides in_features: codes stay, scales are repeated.

    The weight stays the same, number by number; only scales take more room.

    Parameters
    ----------
    layer : QuantizedLayer
        Layer with groups.
    size : int, optional
        New group size, a divisor of the old one; the largest that divides in_features when absent.
    """
    columns = layer.shape[1]
    size = size or math.gcd(columns, layer.group_size)
    if size == layer.group_size:
        return Fitted(layer)
    source = np.arange(0, columns, size) // layer.group_size
    fitted = dataclasses.replace(
        layer,
        group_size=size,
        scales=np.ascontiguousarray(layer.scales[:, source]),
        zeros=None if layer.zeros is None else np.ascontiguousarray(layer.zeros[:, source]),
    )
    more = fitted.n_bytes - layer.n_bytes
    return Fitted(fitted, (f"groups of {layer.group_size} cut to {size}: {more:+d} bytes",))


def even_out(layers: Mapping[str, QuantizedLayer], fitted: Mapping[str, Fitted]) -> dict[str, Fitted]:
    """Cut the groups of all layers as far as those of the layers that had to be split.

    Parameters
    ----------
    layers, fitted : mapping of str to QuantizedLayer and to Fitted
        Before and after fitting, by layer name.

    Returns
    -------
    dict of str to Fitted
        Layers that had one group size have one again.
    """
    sizes: dict[int, int] = {}
    for name, layer in layers.items():
        if fitted[name].layer.group_size != layer.group_size:
            size = sizes.get(layer.group_size, layer.group_size)
            sizes[layer.group_size] = math.gcd(size, fitted[name].layer.group_size)
    even = dict(fitted)
    for name, layer in layers.items():
        if layer.group_size in sizes:
            again = split(fitted[name].layer, sizes[layer.group_size])
            even[name] = Fitted(again.layer, (*fitted[name].notes, *again.notes))
    return even


def as_channel(layer: QuantizedLayer) -> Fitted:
    """Call a row that is one short group by its name: group_size -1 stores the same tensors."""
    if not is_ragged(layer) or layer.scales.shape[1] != 1:
        return Fitted(layer)
    note = f"one group of {layer.shape[1]} columns, stored as one scale per row"
    return Fitted(dataclasses.replace(layer, group_size=-1), (note,))


def in_scale_type(layer: QuantizedLayer, scale_dtype: str, form: str) -> QuantizedLayer:
    """Return the layer with scales called `scale_dtype`, which must hold each of them exactly."""
    if layer.scale_dtype == scale_dtype:
        return layer
    name = {v: k for k, v in _SCALE_DTYPES.items()}[scale_dtype]
    with np.errstate(over="ignore"):
        again = float_to_raw(layer.scales, name).float32()
    if not np.array_equal(again, layer.scales):
        row, group = (int(i) for i in np.argwhere(again != layer.scales)[0])
        raise CheckpointError(
            f"layer {layer.name}: {form} stores scales in {scale_dtype}, which cannot hold "
            f"scale[{row}, {group}] = {layer.scales[row, group]!r} ({layer.scale_dtype}); "
            f"quantize again with scale_dtype={scale_dtype!r}, so that codes fit the stored scales"
        )
    return dataclasses.replace(layer, scale_dtype=scale_dtype)


def restore(layer: QuantizedLayer, settings: Mapping[str, Any], where: str) -> QuantizedLayer:
    """Undo what fitting did to a layer, checking that nothing but that was done.

    Parameters
    ----------
    layer : QuantizedLayer
        As it was read.
    settings : mapping
        `QuantizedLayer.settings` of the layer before it was fitted.
    where : str
        File, for messages.

    Raises
    ------
    CheckpointError
        The tensors do not stand for a layer of these settings.
    """
    name = str(settings["name"])

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{where}: layer {name}: {what}: the tensors were changed after the export")

    rows, columns = (int(n) for n in settings["shape"])
    if layer.bits != settings["bits"] or layer.shape[0] < rows or layer.shape[1] < columns:
        raise refuse(f"{layer.bits} bits, shape {list(layer.shape)}; exported as {dict(settings)}")
    codes, scales, zeros = layer.codes, layer.scales, layer.zeros
    if bool(settings["symmetric"]) and zeros is not None:
        middle = 1 << (layer.bits - 1)
        if (zeros != middle).any():
            raise refuse("a symmetric layer with other zero points")
        codes, zeros = (codes.astype(np.int16) - middle).astype(np.int8), None
    if (zeros is None) != bool(settings["symmetric"]):
        raise refuse("an asymmetric layer without zero points")
    outside = 0 if zeros is None else zeros[rows:, :1]
    if (codes[:rows, columns:] != 0).any() or (codes[rows:] != outside).any():
        raise refuse("codes other than zero in the padding")
    codes = np.ascontiguousarray(codes[:rows, :columns])
    group = int(settings["group_size"])
    n_groups = 1 if group == -1 else -(-columns // group)
    stored = scales.shape[1]
    # Group of the layer that each stored group was cut from; itself where groups were not cut.
    source = np.arange(stored) if stored == n_groups else np.arange(stored) * layer.group_size // group
    if source[-1] != n_groups - 1:
        raise refuse(f"{stored} groups instead of {n_groups}")
    first = np.searchsorted(source, np.arange(n_groups))

    def merged(values: NDArray[Any]) -> NDArray[Any]:
        inner = values[:rows]
        few = np.ascontiguousarray(inner[:, first])
        if not np.array_equal(few[:, source], inner):
            raise refuse("scales that differ within a group")
        return few

    scales = merged(scales)
    zeros = None if zeros is None else merged(zeros)
    restored = dataclasses.replace(
        layer,
        name=name,
        group_size=group,
        symmetric=bool(settings["symmetric"]),
        codes=codes,
        scales=scales,
        zeros=zeros,
        orientation=str(settings["orientation"]),
    )
    return in_scale_type(restored, str(settings["scale_dtype"]), where)
