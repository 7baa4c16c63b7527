"""compressed-tensors, "pack-quantized": the format of llm-compressor. vLLM and transformers read it.

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
from loopq.formats.fitting import Ragged, StoredLayer, as_channel, is_ragged, split
from loopq.formats.fused import EXPERT
from loopq.formats.hf_folder import matches
from loopq.formats.quantized_folder import QuantizedFolder
from loopq.formats.record import Export
from loopq.layers.grid import Grid
from loopq.layers.grids import GRIDS, even
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
class _CompressedConfig:
    config_groups: dict[str, _Group]
    format: str | None = None


class CompressedTensors(QuantizedFolder):
    """Integers of 2, 3, 4 and 8 bits, NVFP4 and MXFP4. Groups divide in_features, or each row has one scale."""

    name: ClassVar[str] = "compressed-tensors"
    loads: ClassVar[str] = "# transformers and vLLM load this folder as it is"
    library: ClassVar[str] = "transformers"
    ragged: ClassVar[tuple[Ragged, ...]] = ("split",)
    has_floats: ClassVar[bool] = True
    reason: ClassVar[str] = "the library refuses groups that do not divide in_features"

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config names compressed-tensors."""
        return config.get("quant_method") == "compressed-tensors"

    def can_hold(self, grid: Grid) -> bool:
        """Whether the library has a format for the grid."""
        return grid.compressed is not None

    def prepare(self, layer: QuantizedLayer, ragged: Ragged | None) -> StoredLayer:
        """Cut ragged groups if that policy was chosen."""
        if layer.orientation == "in_out":
            other = "gptq" if layer.grid.symmetric else "gptq_v2"
            instead = f" or use the format {other!r}" if layer.grid.portable else ""
            raise CheckpointError(
                f"layer {layer.name}: the model keeps it transposed (Conv1D), and compressed-tensors quantizes "
                f"nn.Linear alone; leave the layer dense (--exclude){instead}"
            )
        if not layer.grid.portable and is_ragged(layer):
            raise CheckpointError(
                f"layer {layer.name}: {layer.shape[1]} inputs are no whole groups of {layer.grid.group_size}, which "
                f"{layer.grid.label} has always; --exclude it, or give it integers by --layer"
            )
        single = as_channel(layer)
        if single.layer is not layer:
            return single
        return split(layer) if self.choose(layer, ragged) == "split" else StoredLayer(layer)

    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """The native checkpoint's tensors under the module's name. Floating codes have no separate shape."""
        stored = {key.rpartition(".")[2]: t for key, t in layer.tensors().items()}
        if not layer.grid.portable:
            del stored["weight_shape"]
        return {f"{module}.{key}": t for key, t in stored.items()}

    def config(self, export: Export) -> dict[str, Any]:
        """One config group per kind of grid, that of experts first. `ignore` names every dense matrix.

        Modules have their names in the file, which vLLM matches, and those of transformers' class.
        """
        groups: list[tuple[tuple[str, dict[str, Any]], list[str]]] = []
        # transformers takes the first group for all experts.
        ordered = sorted(export.layers.items(), key=lambda item: not EXPERT.search(item[0]))
        for module, layer in ordered:
            scheme = layer.grid.compressed
            assert scheme is not None
            known = next((modules for kind, modules in groups if kind == scheme), None)
            if known is None:
                groups.append((scheme, [module]))
            else:
                known.append(module)
        config_groups = {}
        for number, ((name, weights), modules) in enumerate(groups):
            # With several groups, a class name would also match the layers of the others.
            targets = ["Linear"] if len(groups) == 1 and not export.groups else export.names(modules)
            config_groups[f"group_{number}"] = {
                "targets": targets,
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": name,
            }
        config_groups |= export.groups
        formats = {group["format"] for group in config_groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": config_groups,
            "ignore": [*export.names(export.dense), *_inside(export.dense)],
            "kv_cache_scheme": None,
        }

    def modules(self, names: Sequence[str]) -> list[str]:
        """Modules with packed weights."""
        return [n.removesuffix(".weight_packed") for n in names if n.endswith(".weight_packed")]

    def read_layer(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer, including files of other tools."""
        where = f"{reader.where}: config.json: module {module!r}"
        group, name = _group_of(module, where, config)
        if name != "pack-quantized":
            return _floats(module, where, name, reader)
        weights = _scheme(group, where)
        if f"{module}.weight_g_idx" in reader.tensors:
            raise CheckpointError(
                f"{reader.where}: tensor '{module}.weight_g_idx': groups that are not runs of columns are not "
                "supported; quantize without activation ordering by group"
            )
        scale = reader.get(f"{module}.weight_scale", ("F16", "BF16", "F32"), (None, None))
        shape = reader.get(f"{module}.weight_shape", ("I64", "I32"), (2,)).array().tolist()
        grid = even(
            bits=weights.num_bits,
            group_size=weights.group_size or -1,
            symmetric=weights.symmetric,
            scale_dtype=DTYPES[scale.dtype],
        )
        settings = {"name": f"{module}.weight", "shape": shape, **grid.described()}
        where = f"{reader.where}: tensor '{module}.weight_shape'"
        return QuantizedLayer.from_tensors(
            checked(LayerSettings, settings, where), _packed_zeros(module, reader, weights.num_bits), {}
        )


def _inside(dense: Sequence[str]) -> list[str]:
    """Patterns for modules that engines put inside list entries that hold a matrix themselves.

    vLLM stores IQuest's gates, `gate_projections.0`, in a separate linear `gate_projections.0.gate_proj`.
    """
    lists = dict.fromkeys(name.rpartition(".")[0] for name in dense if name.rpartition(".")[2].isdigit())
    return [rf"re:{re.escape(name)}\.[0-9]+\..*" for name in lists]


def _packed_zeros(module: str, reader: TensorReader, bits: int) -> TensorReader:
    """Pack the zero points of files from before the library packed them: signed, one byte each."""
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


def _floats(module: str, where: str, name: str, reader: TensorReader) -> QuantizedLayer:
    """Read a layer of a grid with a separate format."""
    for _, kind in GRIDS:
        if name == f"{kind.name}-pack-quantized":
            settings = checked(LayerSettings, kind.from_compressed(reader, module), where)
            shape = RawTensor.of(np.array(settings.shape, dtype=np.int64))
            whole = {**reader.tensors, f"{module}.weight_shape": shape}
            return QuantizedLayer.from_tensors(settings, TensorReader(reader.where, whole, reader.used), {})
    raise CheckpointError(f"{where}: format {name!r}; loopq reads pack-quantized, nvfp4 and mxfp4")


def _group_of(module: str, where: str, config: Mapping[str, Any]) -> tuple[_Group, str]:
    """Scheme of a module and its format. Exact names and patterns precede class names."""
    whole = checked(_CompressedConfig, dict(config), where, others=True)
    groups = list(whole.config_groups.values())
    named = [g for g in groups if any(_applies(t, module, where) for t in g.targets)]
    group = next(iter(named or [g for g in groups if "Linear" in g.targets]), None)
    if group is None or group.weights is None:
        raise CheckpointError(f"{where}: no config group says how it is quantized")
    if group.input_activations is not None:
        raise CheckpointError(f"{where}: quantized activations are not supported")
    return group, str(group.format or whole.format)


def _scheme(group: _Group, where: str) -> _Weights:
    weights = checked(_Weights, group.weights, where, others=True)
    if (weights.strategy == "group") != (weights.group_size not in (None, -1)):
        raise CheckpointError(
            f"{where}: strategy {weights.strategy!r} with group_size {weights.group_size!r}; loopq reads group with a "
            "size, and channel"
        )
    return weights


def _applies(target: str, module: str, where: str) -> bool:
    return matches(target[3:], module, where) if target.startswith("re:") else target == module


FORMATS.register(CompressedTensors.name)(CompressedTensors())
