"""compressed-tensors, "pack-quantized": what llm-compressor writes; vLLM and transformers read it.

Spec: docs/formats/compressed-tensors.md. The tensors are those of the native checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

import loopq._native as native
from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.fitting import Ragged, StoredLayer, as_channel, split
from loopq.formats.quantized_folder import Export, QuantizedFolder, matches
from loopq.layers.layer import Bits, GroupSize, LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import DTYPES, RawTensor
from loopq.storage.schema import Object, checked


@dataclass(frozen=True, kw_only=True)
class _Weights:
    num_bits: Bits
    type: Literal["int"] = "int"
    symmetric: bool = True
    strategy: Literal["group", "channel"]
    group_size: GroupSize | None = None


@dataclass(frozen=True, kw_only=True)
class _Group:
    targets: tuple[str, ...]
    weights: Object | None = None
    input_activations: Object | None = None
    format: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Config:
    config_groups: dict[str, _Group]
    format: str | None = None


class CompressedTensors(QuantizedFolder):
    """Symmetric and asymmetric, 2, 3, 4 and 8 bits, groups that divide in_features, or one scale per row."""

    name: ClassVar[str] = "compressed-tensors"
    loads: ClassVar[str] = "# transformers and vLLM load this folder as it is"
    ragged: ClassVar[tuple[Ragged, ...]] = ("split",)
    reason: ClassVar[str] = (
        "the library refuses groups that do not divide in_features, and a padded matrix does not fit the model"
    )

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config says compressed-tensors."""
        return config.get("quant_method") == "compressed-tensors"

    def prepare(self, layer: QuantizedLayer, ragged: Ragged | None) -> StoredLayer:
        """Cut ragged groups where that was chosen."""
        if layer.orientation != "out_in":
            raise CheckpointError(
                f"layer {layer.name}: the model keeps it transposed (Conv1D), and compressed-tensors quantizes "
                "nn.Linear alone; leave the layer dense (--exclude) or use the format 'gptq'"
            )
        if not layer.name.endswith(".weight"):
            raise CheckpointError(f"layer {layer.name}: compressed-tensors takes a module's 'weight' alone")
        single = as_channel(layer)
        if single.layer is not layer:
            return single
        return split(layer) if self.choose(layer, ragged) == "split" else StoredLayer(layer)

    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """The tensors of the native checkpoint under the module's name."""
        return {f"{module}.{key.rpartition('.')[2]}": t for key, t in layer.tensors().items()}

    def config(self, export: Export) -> dict[str, Any]:
        """One config group for each kind of grid; every dense matrix in `ignore` by its exact name."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for module, layer in export.layers.items():
            groups.setdefault((layer.grid.bits, layer.grid.symmetric, layer.grid.group_size), []).append(
                module
            )
        config_groups = {}
        for number, ((bits, symmetric, group_size), modules) in enumerate(groups.items()):
            # Among several groups a class name would claim the layers of the others.
            targets = ["Linear"] if len(groups) == 1 else modules
            config_groups[f"group_{number}"] = _group(targets, bits, symmetric, group_size)
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": config_groups,
            "ignore": [*export.dense, *_inside(export.dense)],
            "kv_cache_scheme": None,
        }

    def modules(self, names: Sequence[str]) -> list[str]:
        """Modules with packed weights."""
        return [n.removesuffix(".weight_packed") for n in names if n.endswith(".weight_packed")]

    def read_layer(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer, also of a file that another tool wrote."""
        where = f"{reader.where}: config.json: module {module!r}"
        found = _scheme(module, where, config)
        if f"{module}.weight_g_idx" in reader.tensors:
            raise CheckpointError(
                f"{reader.where}: tensor '{module}.weight_g_idx': groups that are not runs of columns are not "
                "supported; quantize without activation ordering by group"
            )
        scale = reader.get(f"{module}.weight_scale", ("F16", "BF16", "F32"), (None, None))
        shape = reader.get(f"{module}.weight_shape", ("I64", "I32"), (2,)).array().tolist()
        settings = {
            "name": f"{module}.weight",
            "bits": found.num_bits,
            "group_size": found.group_size or -1,
            "symmetric": found.symmetric,
            "scale_dtype": DTYPES[scale.dtype],
            "shape": shape,
        }
        where = f"{reader.where}: tensor '{module}.weight_shape'"
        return QuantizedLayer.from_tensors(
            checked(LayerSettings, settings, where), _packed_zeros(module, reader, found.num_bits), {}
        )


def _inside(dense: Sequence[str]) -> list[str]:
    """Patterns for what engines put inside the entries of a list that hold a matrix themselves.

    vLLM keeps IQuest's gates, `gate_projections.0`, in a linear `gate_projections.0.gate_proj` of its own.
    """
    lists = dict.fromkeys(name.rpartition(".")[0] for name in dense if name.rpartition(".")[2].isdigit())
    return [rf"re:{re.escape(name)}\.[0-9]+\..*" for name in lists]


def _group(targets: list[str], bits: int, symmetric: bool, group_size: int) -> dict[str, Any]:
    channel = group_size == -1
    return {
        "targets": targets,
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "channel" if channel else "group",
            "group_size": None if channel else group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }


def _packed_zeros(module: str, reader: TensorReader, bits: int) -> TensorReader:
    """Pack the zero points of files of before the library did: signed, one byte each."""
    name = f"{module}.weight_zero_point"
    stored = reader.tensors.get(name)
    if stored is None or stored.dtype != "I8":
        return reader
    values = reader.get(name, ["I8"], (None, None)).array().astype(np.int16) + (1 << (bits - 1))
    if (values < 0).any() or (values >= 1 << bits).any():
        raise CheckpointError(f"{reader.where}: tensor {name!r} holds zero points outside {bits} bits")
    words = native.pack_dense(np.ascontiguousarray(values.T.astype(np.uint8)), bits, 0)
    packed = RawTensor.of(np.ascontiguousarray(words.T))
    return TensorReader(reader.where, {**reader.tensors, name: packed}, reader.used)


def _scheme(module: str, where: str, config: Mapping[str, Any]) -> _Weights:
    """Settings of a module: exact names and patterns come before class names."""
    whole = checked(_Config, dict(config), where, others=True)
    groups = list(whole.config_groups.values())
    named = [g for g in groups if any(_applies(t, module, where) for t in g.targets)]
    group = next(iter(named or [g for g in groups if "Linear" in g.targets]), None)
    if group is None or group.weights is None:
        raise CheckpointError(f"{where}: no config group says how it is quantized")
    if group.input_activations is not None:
        raise CheckpointError(f"{where}: quantized activations are not supported")
    if (group.format or whole.format) != "pack-quantized":
        raise CheckpointError(f"{where}: format {group.format or whole.format!r}; loopq reads pack-quantized")
    found = checked(_Weights, group.weights, where, others=True)
    if (found.strategy == "group") != (found.group_size not in (None, -1)):
        raise CheckpointError(
            f"{where}: strategy {found.strategy!r} with group_size {found.group_size!r}; loopq reads group with a "
            "size, and channel"
        )
    return found


def _applies(target: str, module: str, where: str) -> bool:
    return matches(target[3:], module, where) if target.startswith("re:") else target == module


FORMATS.register(CompressedTensors.name)(CompressedTensors())
