"""GPTQ files: version 1 ("gptq", symmetric) and version 2 ("gptq_v2", any zero points).

Spec: docs/formats/gptq.md. GPTQModel, optimum with transformers, and vLLM read these files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.fitting import Ragged, StoredLayer, in_scale_type, split
from loopq.formats.hf_folder import QUANTIZE_CONFIG, matches
from loopq.formats.quantized_folder import QuantizedFolder
from loopq.formats.record import Export
from loopq.layers.grid import Grid
from loopq.layers.grids import even
from loopq.layers.layer import Bits, GroupSize, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import DTYPES, RawTensor, float_to_raw, json_bytes
from loopq.storage.schema import Object, checked, shown


@dataclass(frozen=True)
class _GPTQConfig:
    """Settings of a module, and changes by name pattern. "-:" leaves modules unchanged."""

    bits: Bits
    group_size: GroupSize
    sym: bool = True
    pack_dtype: Literal["int32"] = "int32"
    dynamic: Object | None = None


class GPTQFolder(QuantizedFolder):
    """2, 3, 4 and 8 bits. The two versions differ in the storage of a zero point.

    Attributes
    ----------
    version : {1, 2}
        Version 1 stores z - 1 modulo 2^bits, version 2 stores z.
    """

    name: ClassVar[str] = "gptq"
    ragged: ClassVar[tuple[Ragged, ...]] = ("keep", "split")
    one_group_size: ClassVar[bool] = True
    version: ClassVar[int] = 1
    loads: ClassVar[str] = "# transformers with optimum and gptqmodel, and vLLM, load this folder as it is"
    library: ClassVar[str] = "transformers"

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config names GPTQ of this version. A missing version means version 1."""
        if config.get("quant_method") != "gptq":
            return False
        return bool((config.get("checkpoint_format") or config.get("format") or "gptq") == self.name)

    def prepare(self, layer: QuantizedLayer, ragged: Ragged | None) -> StoredLayer:
        """Cut ragged groups if that policy was chosen. Scales must be exact in float16."""
        if not layer.grid.symmetric and self.version == 1:
            raise CheckpointError(
                f"layer {layer.name}: an asymmetric grid in GPTQ version 1 is refused by GPTQModel, since tools "
                "disagree on its zero points; use the format 'gptq_v2', or a symmetric grid"
            )
        half = in_scale_type(layer, "float16", self.name)
        return split(half) if self.choose(layer, ragged) == "split" else StoredLayer(half)

    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """qweight, qzeros, scales and g_idx of a layer."""
        bits, columns = layer.grid.bits, layer.shape[1]
        words = native.pack_dense(layer.codes, bits, layer.grid.offset)
        zeros = (
            np.full(layer.scales.shape, layer.grid.offset, np.uint8) if layer.zeros is None else layer.zeros
        )
        stored = (zeros.astype(np.int16) - 1 if self.version == 1 else zeros.astype(np.int16)) % (1 << bits)
        packed = native.pack_dense(np.ascontiguousarray(stored.T.astype(np.uint8)), bits, 0)
        width = layer.grid.width(columns)
        return {
            f"{module}.qweight": RawTensor.of(np.ascontiguousarray(words.T)),
            f"{module}.qzeros": RawTensor.of(packed),
            f"{module}.scales": float_to_raw(np.ascontiguousarray(layer.scales.T), "F16"),
            f"{module}.g_idx": RawTensor.of((np.arange(columns) // width).astype(np.int32)),
        }

    def config(self, export: Export) -> dict[str, Any]:
        """Settings of most layers, and `dynamic` rules for those that differ or stay dense."""
        kinds: dict[tuple[int, int, bool], int] = {}
        for layer in export.layers.values():
            key = _own(layer.grid)
            kinds[key] = kinds.get(key, 0) + 1
        common = max(kinds, key=lambda k: kinds[k])
        bits, group_size, symmetric = common
        dynamic: dict[str, dict[str, Any]] = {
            f"-:^{re.escape(name)}$": {} for name in export.names(export.dense)
        }
        for module, layer in export.layers.items():
            kind = _own(layer.grid)
            if kind != common:
                values = dict(zip(("bits", "group_size", "sym"), kind, strict=True))
                dynamic |= {f"+:^{re.escape(name)}$": values for name in export.names([module])}
        modules = list(export.layers)
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "sym": symmetric,
            "desc_act": False,
            "lm_head": "lm_head" in export.layers,
            "checkpoint_format": self.name,
            "format": self.name,
            "pack_dtype": "int32",
            "dynamic": dynamic,
            # For optimum, which otherwise takes every nn.Linear under a block with a guessed name.
            "block_name_to_quantize": _common_path(modules),
            "modules_in_block_to_quantize": [modules],
            "meta": dict(export.report),
        }

    def more_files(self, quantization: Mapping[str, Any]) -> dict[str, bytes]:
        """The same settings in a separate file for older readers."""
        return {QUANTIZE_CONFIG: json_bytes(quantization)}

    def remarks(self, export: Export) -> tuple[str, ...]:
        """Layers outside numbered blocks. GPTQModel leaves them at their initial values without an error."""
        outside = [name for name in export.layers if not re.search(r"\.\d+\.", f".{name}.")]
        if not outside:
            return ()
        return (
            f"GPTQModel does not fill quantized layers outside numbered blocks ({', '.join(outside[:3])}) and "
            "does not say so; load this with transformers and optimum, or leave them dense (quantize --exclude)",
        )

    def modules(self, names: Sequence[str]) -> list[str]:
        """Modules with a qweight."""
        return [n.removesuffix(".qweight") for n in names if n.endswith(".qweight")]

    def read_layer(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer, including files of other tools."""
        settings = _settings(module, f"{reader.where}: config.json: module {module!r}", config)
        bits, group_size = settings.bits, settings.group_size
        n_words, rows = reader.get(f"{module}.qweight", ("I32",), (None, None)).shape
        columns = _check_order(module, reader, group_size, n_words * 32 // bits)
        if rows < 1 or columns < 1:
            raise CheckpointError(f"{reader.where}: tensor '{module}.qweight': no rows or no columns")
        kind = DTYPES[reader.get(f"{module}.scales", ("F16", "BF16", "F32"), (None, rows)).dtype]
        grid = even(bits=bits, group_size=group_size, symmetric=settings.sym, scale_dtype=kind)
        n_groups = grid.n_groups(columns)
        codes = reader.codes(f"{module}.qweight", bits, columns, rows, down=True)
        scales = reader.scales(f"{module}.scales", (n_groups, rows))
        zeros = reader.codes(f"{module}.qzeros", bits, rows, n_groups).T
        if self.version == 1:
            zeros = ((zeros.astype(np.int16) + 1) % (1 << bits)).astype(np.uint8)
        if settings.sym:
            codes = _signed(codes, zeros, bits, f"{reader.where}: tensor '{module}.qzeros'")
        return QuantizedLayer(
            name=f"{module}.weight",
            grid=grid,
            codes=np.ascontiguousarray(codes),
            scales=np.ascontiguousarray(scales.T),
            zeros=None if settings.sym else np.ascontiguousarray(zeros),
        )


#: Output of each nibble in AWQ's words, from the lowest.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GPTQv2Folder(GPTQFolder):
    """Version 2: any zero point. AWQ's files are also read as such, since they store the same numbers differently."""

    name: ClassVar[str] = "gptq_v2"
    version: ClassVar[int] = 2
    # Fewer tools read it.
    loads: ClassVar[str] = QuantizedFolder.loads

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config names GPTQ of this version, or AWQ."""
        return config.get("quant_method") == "awq" or super().describes(config)

    def plain(self, tensors: Mapping[str, RawTensor], path: Path) -> Mapping[str, RawTensor]:
        """Convert AWQ's codes to words of GPTQ. AWQ's words run along the outputs."""
        converted = dict(tensors)
        for module in self.modules(list(tensors)):
            words, zeros, scales = (tensors.get(f"{module}.{n}") for n in ("qweight", "qzeros", "scales"))
            if words is None or zeros is None or scales is None or len(words.shape) != 2:
                continue
            if words.shape[1:] == scales.shape[1:]:
                continue
            codes = native.pack_dense(np.ascontiguousarray(_awq_codes(words, path, module).T), 4, 0)
            converted[f"{module}.qweight"] = RawTensor.of(np.ascontiguousarray(codes.T))
            packed = native.pack_dense(_awq_codes(zeros, path, module), 4, 0)
            converted[f"{module}.qzeros"] = RawTensor.of(packed)
        return converted

    def read_layer(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer. AWQ layers always have zero points."""
        awq = {"sym": False} if config.get("quant_method") == "awq" else {}
        return super().read_layer(module, reader, {**config, **awq})


def _awq_codes(words: RawTensor, path: Path, module: str) -> NDArray[np.uint8]:
    """Codes (rows, outputs) of words (rows, outputs / 8)."""
    if words.dtype != "I32" or len(words.shape) != 2:
        raise CheckpointError(
            f"{path}: module {module!r}: {words.dtype} {shown(list(words.shape))} is no AWQ"
        )
    bits = words.array().view(np.uint32)
    codes = np.empty((*bits.shape, 8), np.uint8)
    for place, output in enumerate(_AWQ_ORDER):
        codes[..., output] = bits >> np.uint32(4 * place) & 15
    return codes.reshape(len(bits), -1)


def _own(grid: Grid) -> tuple[int, int, bool]:
    """Settings that can differ by module."""
    return grid.bits, grid.group_size, grid.symmetric


def _signed(codes: NDArray[Any], zeros: NDArray[Any], bits: int, what: str) -> NDArray[np.int8]:
    middle = 1 << (bits - 1)
    if (zeros != middle).any():
        row, group = (int(i) for i in np.argwhere(zeros != middle)[0])
        raise CheckpointError(
            f"{what}: zero point {int(zeros[row, group])} of output {row}, group {group}; the config says sym, "
            f"which is {middle}"
        )
    return (codes.astype(np.int16) - middle).astype(np.int8)


def _check_order(module: str, reader: TensorReader, group_size: int, columns: int) -> int:
    """Return in_features: the length of an ordered g_idx. Without g_idx, the size of the words."""
    name = f"{module}.g_idx"
    if name not in reader.tensors:
        return columns
    index = reader.get(name, ("I32", "I64"), (None,)).array()
    expected = np.arange(len(index)) // (group_size if group_size != -1 else max(len(index), 1))
    wrong = np.flatnonzero(index != expected)
    if wrong.size:
        j = int(wrong[0])
        raise CheckpointError(
            f"{reader.where}: tensor {name!r}: column {j} is in group {index[j]} instead of {expected[j]}: groups in "
            "the order of activations (desc_act) are not supported; quantize with static groups"
        )
    return len(index)


def _common_path(modules: Sequence[str]) -> str:
    """Longest common path of all modules. "" if there is none."""
    paths = [m.split(".")[:-1] for m in modules]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _settings(module: str, where: str, config: Mapping[str, Any]) -> _GPTQConfig:
    """Settings of a module, with the rules of `dynamic` applied as in GPTQModel."""
    settings = checked(_GPTQConfig, dict(config), where, others=True)
    for pattern, changes in (settings.dynamic or {}).items():
        if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), module, where):
            changed = checked(dict[str, Any], changes, f"{where}: dynamic: {shown(pattern)}")
            return checked(_GPTQConfig, {**config, **changed}, where, others=True)
    return settings


FORMATS.register(GPTQFolder.name)(GPTQFolder())
FORMATS.register(GPTQv2Folder.name)(GPTQv2Folder())
