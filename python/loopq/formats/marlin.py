"""Marlin files (IST-DASLab): symmetric INT4 in the order that its kernel reads, padded to whole tiles.

Spec: docs/formats/marlin.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

import loopq._native as native
from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.fitting import Ragged, StoredLayer, in_scale_type, is_ragged
from loopq.formats.quantized_folder import QuantizedFolder
from loopq.formats.record import Export
from loopq.layers.grids.integer import Integer
from loopq.layers.layer import QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import DTYPES, RawTensor, float_to_raw
from loopq.storage.schema import checked

#: Multiples that the kernel asks of inputs and outputs.
K_TILE, N_TILE = 128, 256
GROUP = 128


@dataclass(frozen=True)
class _MarlinConfig:
    group_size: Literal[-1, 128]
    bits: Literal[4] = 4


class Marlin(QuantizedFolder):
    """Symmetric INT4, one scale per 128 inputs or per output, float16 scales, K % 128 = N % 256 = 0."""

    name: ClassVar[str] = "marlin"
    ragged: ClassVar[tuple[Ragged, ...]] = ("pad",)
    reason: ClassVar[str] = "its kernel takes groups of 128 that divide the inputs"

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config names marlin."""
        return config.get("quant_method") == "marlin"

    def prepare(self, layer: QuantizedLayer, ragged: Ragged | None) -> StoredLayer:
        """Pad inputs and outputs to whole tiles. Padding has zero codes, and padded rows have a scale of 1."""
        if layer.grid.bits != 4 or not isinstance(layer.grid, Integer):
            raise CheckpointError(
                f"layer {layer.name}: Marlin holds symmetric INT4 alone: give --bits 4 --group-size 128 --levels even"
            )
        if layer.grid.group_size not in (-1, GROUP) and layer.scales.shape[1] != 1:
            raise CheckpointError(
                f"layer {layer.name}: Marlin holds groups of {GROUP} or one scale per row, not groups of "
                f"{layer.grid.group_size}; quantize again with one of these"
            )
        if is_ragged(layer) and ragged not in (None, "pad"):
            raise CheckpointError(f"layer {layer.name}: Marlin cannot {ragged} a ragged group: {self.reason}")
        half = in_scale_type(layer, "float16", self.name)
        rows, columns = layer.shape
        n, k = -(-rows // N_TILE) * N_TILE, -(-columns // K_TILE) * K_TILE
        if layer.scales.shape[1] == 1 and layer.grid.group_size not in (-1, GROUP):
            half = half.on_grid(group_size=-1)
        if (n, k) == (rows, columns):
            return StoredLayer(half)
        pad = ((0, n - rows), (0, k - columns))
        padded = dataclasses.replace(
            half,
            codes=np.pad(half.codes, pad),
            scales=np.pad(half.scales, (pad[0], (0, 0)), constant_values=1.0),
        )
        more = sum(t.data.size for t in self.tensors("x", padded).values()) - layer.n_bytes
        note = f"padded from {rows}x{columns} to {n}x{k} with zeros: {more:+d} bytes ({more / layer.n_bytes:+.1%})"
        return StoredLayer(padded, (note,))

    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """`B` and `s` of a padded layer."""
        words, scales = native.marlin_pack(layer.codes, np.ascontiguousarray(layer.scales))
        return {f"{module}.B": RawTensor.of(words), f"{module}.s": float_to_raw(scales, "F16")}

    def config(self, export: Export) -> dict[str, Any]:
        """The quantization config. It holds one group size."""
        sizes = {m.grid.group_size for m in export.layers.values()}
        if len(sizes) > 1:
            raise CheckpointError(
                f"Marlin's config holds one group size; the layers have {sorted(sizes)}: leave those of one dense"
            )
        return {
            "quant_method": "marlin",
            "checkpoint_format": "marlin",
            "bits": 4,
            "group_size": sizes.pop() if sizes else GROUP,
            "sym": True,
            "desc_act": False,
            "lm_head": "lm_head" in export.layers,
            "modules_not_converted": list(export.dense),
        }

    def modules(self, names: Sequence[str]) -> list[str]:
        """Modules with `B` and `s`."""
        known = set(names)
        return [n[:-2] for n in names if n.endswith(".B") and f"{n[:-2]}.s" in known]

    def read_layer(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer with its padding. Only loopq's record tells where the padding begins."""
        group_size = checked(
            _MarlinConfig, dict(config), f"{reader.where}: config.json", others=True
        ).group_size
        words = reader.get(f"{module}.B", ("I32",), (None, None)).array()
        k, n = words.shape[0] * 16, words.shape[1] // 2
        if words.size == 0 or words.shape[1] % 128:
            raise CheckpointError(
                f"{reader.where}: tensor '{module}.B' has shape {list(words.shape)}; expected (K / 16, 2 N) with N a "
                "multiple of 64"
            )
        kind = DTYPES[reader.get(f"{module}.s", ("F16", "BF16", "F32"), (None, n)).dtype]
        grid = Integer(4, group_size, kind)
        stored = reader.scales(f"{module}.s", (grid.n_groups(k), n))
        codes, scales = native.marlin_unpack(np.ascontiguousarray(words), np.ascontiguousarray(stored))
        return QuantizedLayer(f"{module}.weight", grid, codes, scales, None)


FORMATS.register(Marlin.name)(Marlin())
