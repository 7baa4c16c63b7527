"""compressed-tensors, "pack-quantized": what llm-compressor writes; vLLM and transformers read it.

Spec: docs/formats/compressed-tensors.md. The tensors are those of the native checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from loopq.checkpoint import FORMATS
from loopq.checkpoint.files import RawTensor
from loopq.checkpoint.form import Export, Fitted, Format, Ragged, Shelf, as_channel, choose, split
from loopq.checkpoint.layer import QuantizedLayer, unpack_codes
from loopq.errors import CheckpointError

_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


class CompressedTensors(Format):
    """Symmetric and asymmetric, 2, 3, 4 and 8 bits, groups that divide in_features, or one scale per row."""

    name: ClassVar[str] = "compressed-tensors"
    ragged: ClassVar[tuple[Ragged, ...]] = ("split",)
    reason: ClassVar[str] = (
        "the library refuses groups that do not divide in_features, and a padded matrix does not fit the model"
    )

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config says compressed-tensors."""
        return config.get("quant_method") == "compressed-tensors"

    def fit(self, layer: QuantizedLayer, ragged: Ragged | None) -> Fitted:
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
        return split(layer) if choose(layer, ragged, self) == "split" else Fitted(layer)

    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """The tensors of the native checkpoint under the module's name."""
        return {f"{module}.{key.rpartition('.')[2]}": t for key, t in layer.tensors().items()}

    def config(self, export: Export) -> dict[str, Any]:
        """One config group for each kind of grid; every dense matrix in `ignore` by its exact name."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for module, layer in export.layers.items():
            groups.setdefault((layer.bits, layer.symmetric, layer.group_size), []).append(module)
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
            "ignore": list(export.dense),
            "kv_cache_scheme": None,
        }

    def modules(self, names: Sequence[str]) -> list[str]:
        """Modules with packed weights."""
        return [n.removesuffix(".weight_packed") for n in names if n.endswith(".weight_packed")]

    def read(self, module: str, shelf: Shelf, config: Mapping[str, Any]) -> tuple[QuantizedLayer, list[str]]:
        """Read one layer, also of a file that another tool wrote."""
        args = _scheme(module, shelf.where, config)
        bits, symmetric, group_size = args
        shape = shelf.get(f"{module}.weight_shape", ("I64", "I32"), (2,)).array()
        rows, columns = (int(n) for n in shape)
        if rows < 1 or columns < 1:
            raise CheckpointError(f"{shelf.where}: tensor '{module}.weight_shape' says {[rows, columns]}")
        n_groups = 1 if group_size == -1 else -(-columns // group_size)
        name = f"{module}.weight_packed"
        packed = shelf.get(name, ("I32",), (rows, -(-columns * bits // 32))).array()
        offset = 1 << (bits - 1) if symmetric else 0
        codes = unpack_codes(packed, bits, columns, offset, f"{shelf.where}: tensor {name!r}")
        scales, scale_dtype = shelf.scales(f"{module}.weight_scale", (rows, n_groups))
        zeros = None if symmetric else _zeros(module, shelf, bits, rows, n_groups)
        if f"{module}.weight_g_idx" in shelf.tensors:
            raise CheckpointError(
                f"{shelf.where}: tensor '{module}.weight_g_idx': groups that are not runs of columns are not "
                "supported; quantize without activation ordering by group"
            )
        layer = QuantizedLayer(
            f"{module}.weight", bits, group_size, symmetric, codes, scales, zeros, scale_dtype
        )
        return layer, [f"{module}.{p}" for p in _PARTS if f"{module}.{p}" in shelf.tensors]


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


def _zeros(module: str, shelf: Shelf, bits: int, rows: int, n_groups: int) -> Any:
    name = f"{module}.weight_zero_point"
    stored = shelf.get(name, ("I32", "I8"), (None, n_groups))
    if stored.dtype == "I8":
        # Files of before zero points were packed: signed, one byte each.
        values = shelf.get(name, ("I8",), (rows, n_groups)).array().astype(np.int16) + (1 << (bits - 1))
        if (values < 0).any() or (values >= 1 << bits).any():
            raise CheckpointError(f"{shelf.where}: tensor {name!r} holds zero points outside {bits} bits")
        return values.astype(np.uint8)
    packed = shelf.get(name, ("I32",), (-(-rows * bits // 32), n_groups)).array()
    found = unpack_codes(packed.T, bits, rows, 0, f"{shelf.where}: tensor {name!r}")
    return np.ascontiguousarray(found.T)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _scheme(module: str, where: str, config: Mapping[str, Any]) -> tuple[int, bool, int]:
    """Bits, symmetry and group size of a module: exact names and patterns come before class names."""
    groups = [g for g in config.get("config_groups", {}).values() if isinstance(g, Mapping)]
    named = [g for g in groups if any(_matches(str(t), module) for t in g.get("targets", ()))]
    by_class = [g for g in groups if "Linear" in g.get("targets", ())]
    found = next(iter(named or by_class), None)
    if found is None or not isinstance(found.get("weights"), Mapping):
        raise CheckpointError(
            f"{where}: config.json: no config group says how module {module!r} is quantized"
        )
    form = found.get("format") or config.get("format")
    weights = found["weights"]
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if form != "pack-quantized" or weights.get("type", "int") != "int" or bits not in (2, 3, 4, 8):
        raise CheckpointError(
            f"{where}: module {module!r}: format {form!r} with {bits} bits of type {weights.get('type')!r}; "
            "loopq reads pack-quantized integers of 2, 3, 4 or 8 bits"
        )
    if found.get("input_activations") is not None:
        raise CheckpointError(f"{where}: module {module!r}: quantized activations are not supported")
    group_size = weights.get("group_size")
    if strategy not in ("group", "channel") or (strategy == "group") != (group_size not in (None, -1)):
        raise CheckpointError(
            f"{where}: module {module!r}: strategy {strategy!r} with group_size {group_size!r}; loopq reads "
            "group with a size, and channel"
        )
    return int(bits), bool(weights.get("symmetric", True)), int(group_size) if strategy == "group" else -1


FORMATS.register("compressed-tensors")(CompressedTensors())
