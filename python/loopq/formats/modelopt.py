"""ModelOpt's layout of NVFP4, weights alone ("W4A16_NVFP4"). vLLM, SGLang and TensorRT-LLM read it on a GPU.

Spec: docs/formats/levels.md. Codes and scales are those of compressed-tensors under other names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.fitting import Ragged, StoredLayer, is_ragged
from loopq.formats.hf_folder import HF_QUANT_CONFIG
from loopq.formats.quantized_folder import QuantizedFolder
from loopq.formats.record import Export
from loopq.layers.grid import Grid
from loopq.layers.grids.fp4 import NVFP4
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor, json_bytes
from loopq.storage.schema import checked

ALGORITHM = "W4A16_NVFP4"


class ModelOpt(QuantizedFolder):
    """NVFP4 without scales of activations."""

    name: ClassVar[str] = "modelopt"
    loads: ClassVar[str] = "# vLLM and SGLang load this folder as it is, on a GPU"
    ragged: ClassVar[tuple[Ragged, ...]] = ()
    has_floats: ClassVar[bool] = True

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config names an NVFP4 algorithm of ModelOpt."""
        named = config.get("quant_method") == self.name
        return named and "NVFP4" in str(config.get("quant_algo")).upper()

    def can_hold(self, grid: Grid) -> bool:
        """Any grid here: `prepare` refuses all but NVFP4, with a message of its own."""
        return True

    def prepare(self, layer: QuantizedLayer, ragged: Ragged | None) -> StoredLayer:
        """Refuse what the layout has no form for."""
        reasons = {
            f"its codes are {layer.grid.label}; quantize with --levels nvfp4 --group-size 16": not isinstance(
                layer.grid, NVFP4
            ),
            "the model keeps it transposed (Conv1D); --exclude it": layer.orientation == "in_out",
            f"{layer.shape[1]} inputs are no whole groups; --exclude it": is_ragged(layer),
        }
        for reason, holds in reasons.items():
            if holds:
                raise CheckpointError(
                    f"layer {layer.name}: {self.name} holds NVFP4 of nn.Linear alone: {reason}"
                )
        return StoredLayer(layer)

    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """Halves, scales, and the factor of the scales."""
        stored = {key.rpartition(".")[2]: t for key, t in layer.tensors().items()}
        factor = 1 / stored["weight_global_scale"].array()[0]
        return {
            f"{module}.weight": stored["weight_packed"],
            f"{module}.weight_scale": stored["weight_scale"],
            f"{module}.weight_scale_2": RawTensor.of(np.array(factor, dtype=np.float32)),
        }

    def config(self, export: Export) -> dict[str, Any]:
        """One group, and every dense matrix by its exact name."""
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        name, _, version = export.report["quantizer"][0].partition(":")
        return {
            "quant_method": self.name,
            "quant_algo": ALGORITHM,
            "group_size": 16,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": list(export.dense),
            "producer": {"name": name, "version": version},
        }

    def more_files(self, quantization: Mapping[str, Any]) -> dict[str, bytes]:
        """The same in ModelOpt's own file."""
        entries = {
            "quant_algo": ALGORITHM,
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": quantization["ignore"],
        }
        return {HF_QUANT_CONFIG: json_bytes({"producer": quantization["producer"], "quantization": entries})}

    def remarks(self, export: Export) -> tuple[str, ...]:
        """Dense modules whose names are part of a quantized one's. vLLM then takes both for dense."""
        pairs = ((dense, layer) for dense in export.dense for layer in export.layers if dense in layer)
        return tuple(
            f"vLLM takes {layer} for a dense layer, since the name of {dense} is part of its name"
            for dense, layer in pairs
        )

    def modules(self, names: Sequence[str]) -> list[str]:
        """Modules with a factor of their scales."""
        return [n.removesuffix(".weight_scale_2") for n in names if n.endswith(".weight_scale_2")]

    def read_layer(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer under the names of compressed-tensors."""
        packed = reader.get(f"{module}.weight", ("U8",), (None, None))
        factor = reader.get(f"{module}.weight_scale_2", ("F32",), ()).array()
        with np.errstate(divide="ignore"):
            divisor = RawTensor.of(np.reshape(1 / factor, 1).astype(np.float32))
        rows, half = packed.shape
        renamed = {
            f"{module}.weight_packed": packed,
            f"{module}.weight_global_scale": divisor,
            f"{module}.weight_shape": RawTensor.of(np.array([rows, 2 * half], dtype=np.int64)),
        }
        whole = dataclasses.replace(reader, tensors={**reader.tensors, **renamed})
        settings = checked(LayerSettings, NVFP4.from_compressed(whole, module), f"{reader.where}: {module}")
        return QuantizedLayer.from_tensors(settings, whole, {})


FORMATS.register(ModelOpt.name)(ModelOpt())
