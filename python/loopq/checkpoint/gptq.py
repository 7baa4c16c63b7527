"""GPTQ files: version 1 ("gptq", symmetric) and version 2 ("gptq_v2", any zero points).

Spec: docs/formats/gptq.md. GPTQModel, optimum with transformers, and vLLM read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.checkpoint import FORMATS
from loopq.checkpoint.files import RawTensor, float_to_raw
from loopq.checkpoint.form import Export, Fitted, Format, Ragged, Shelf, choose, in_scale_type, split
from loopq.checkpoint.layer import QuantizedLayer, unpack_codes
from loopq.errors import CheckpointError

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class GPTQ(Format):
    """2, 3, 4 and 8 bits; what the two versions differ in is how a zero point is stored.

    Parameters
    ----------
    version : {1, 2}
        1 stores z - 1 modulo 2^bits, 2 stores z.
    """

    ragged: ClassVar[tuple[Ragged, ...]] = ("keep", "split")
    reason: ClassVar[str] = "a padded matrix does not fit the model"
    one_group_size: ClassVar[bool] = True

    def __init__(self, version: int) -> None:
        self.version = version

    @property
    def name(self) -> str:  # type: ignore[override]  # one class, two names
        """Value of `checkpoint_format`."""
        return "gptq" if self.version == 1 else "gptq_v2"

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the config says GPTQ of this version; one without a version is of the first."""
        if config.get("quant_method") != "gptq":
            return False
        return bool((config.get("checkpoint_format") or config.get("format") or "gptq") == self.name)

    def fit(self, layer: QuantizedLayer, ragged: Ragged | None) -> Fitted:
        """Cut ragged groups where that was chosen; scales must be exact in float16."""
        if not layer.name.endswith(".weight"):
            raise CheckpointError(f"layer {layer.name}: GPTQ files take a module's 'weight' alone")
        if not layer.symmetric and self.version == 1:
            raise CheckpointError(
                f"layer {layer.name}: an asymmetric grid in GPTQ version 1 is refused by GPTQModel, since tools "
                "disagree on its zero points; use the format 'gptq_v2'"
            )
        half = in_scale_type(layer, "float16", self.name)
        return split(half) if choose(layer, ragged, self) == "split" else Fitted(half)

    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """qweight, qzeros, scales and g_idx of a layer."""
        bits, columns = layer.bits, layer.shape[1]
        offset = 1 << (bits - 1) if layer.symmetric else 0
        words = native.pack_dense(layer.codes, bits, offset)
        zeros = np.full(layer.scales.shape, offset, np.uint8) if layer.zeros is None else layer.zeros
        stored = (zeros.astype(np.int16) - 1 if self.version == 1 else zeros.astype(np.int16)) % (1 << bits)
        packed = native.pack_dense(np.ascontiguousarray(stored.T.astype(np.uint8)), bits, 0)
        width = columns if layer.group_size == -1 else layer.group_size
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
            key = (layer.bits, layer.group_size, layer.symmetric)
            kinds[key] = kinds.get(key, 0) + 1
        common = max(kinds, key=lambda k: kinds[k])
        bits, group_size, symmetric = common
        dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in export.dense}
        for module, layer in export.layers.items():
            own = (layer.bits, layer.group_size, layer.symmetric)
            if own != common:
                values = dict(zip(("bits", "group_size", "sym"), own, strict=True))
                dynamic[f"+:^{re.escape(module)}$"] = values
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
            # For optimum, which else takes every nn.Linear under a block whose name it guesses.
            "block_name_to_quantize": _common_path(modules),
            "modules_in_block_to_quantize": [modules],
            "meta": dict(export.report),
        }

    def remarks(self, export: Export) -> tuple[str, ...]:
        """Layers outside numbered blocks, which GPTQModel leaves as they were initialised, without an error."""
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

    def read(self, module: str, shelf: Shelf, config: Mapping[str, Any]) -> tuple[QuantizedLayer, list[str]]:
        """Read one layer, also of a file that another tool wrote."""
        bits, group_size, symmetric = _settings(module, shelf.where, config)
        words = shelf.get(f"{module}.qweight", ("I32",), (None, None)).array()
        columns, rows = self._columns(module, shelf, words.shape[0], bits), words.shape[1]
        packed = shelf.get(f"{module}.qweight", ("I32",), (-(-columns * bits // 32), None)).array()
        n_groups = 1 if group_size == -1 else -(-columns // group_size)
        _check_order(module, shelf, columns, group_size)
        at = f"{shelf.where}: tensor '{module}."
        codes = unpack_codes(packed.T, bits, columns, 0, f"{at}qweight'")
        scales, scale_dtype = shelf.scales(f"{module}.scales", (n_groups, rows))
        stored = shelf.get(f"{module}.qzeros", ("I32",), (n_groups, -(-rows * bits // 32))).array()
        zeros = unpack_codes(stored, bits, rows, 0, f"{at}qzeros'").T
        if self.version == 1:
            zeros = ((zeros.astype(np.int16) + 1) % (1 << bits)).astype(np.uint8)
        if symmetric:
            codes = _signed(codes, zeros, bits, f"{at}qzeros'")
        layer = QuantizedLayer(
            name=f"{module}.weight",
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            codes=np.ascontiguousarray(codes),
            scales=np.ascontiguousarray(scales.T),
            zeros=None if symmetric else np.ascontiguousarray(zeros),
            scale_dtype=scale_dtype,
        )
        return layer, [f"{module}.{p}" for p in _PARTS if f"{module}.{p}" in shelf.tensors]

    def _columns(self, module: str, shelf: Shelf, n_words: int, bits: int) -> int:
        """in_features: the length of g_idx, or what the words hold where there is none."""
        name = f"{module}.g_idx"
        if name in shelf.tensors:
            return int(shelf.get(name, ("I32", "I64"), (None,)).shape[0])
        return n_words * 32 // bits


def _signed(codes: NDArray[Any], zeros: NDArray[Any], bits: int, what: str) -> NDArray[np.int8]:
    middle = 1 << (bits - 1)
    if (zeros != middle).any():
        row, group = (int(i) for i in np.argwhere(zeros != middle)[0])
        raise CheckpointError(
            f"{what}: zero point {int(zeros[row, group])} of output {row}, group {group}; the config says sym, "
            f"which is {middle}"
        )
    return (codes.astype(np.int16) - middle).astype(np.int8)


def _check_order(module: str, shelf: Shelf, columns: int, group_size: int) -> None:
    name = f"{module}.g_idx"
    if name not in shelf.tensors:
        return
    index = shelf.get(name, ("I32", "I64"), (columns,)).array()
    width = columns if group_size == -1 else group_size
    wrong = np.flatnonzero(index != np.arange(columns) // width)
    if wrong.size:
        j = int(wrong[0])
        raise CheckpointError(
            f"{shelf.where}: tensor {name!r}: column {j} is in group {int(index[j])} instead of {j // width}: groups "
            "in the order of activations (desc_act) are not supported; quantize with static groups"
        )


def _common_path(modules: Sequence[str]) -> str:
    """Longest path that all modules lie under; "" where there is none."""
    paths = [m.split(".")[:-1] for m in modules]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _settings(module: str, where: str, config: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Bits, group size and symmetry of a module, with the rules of `dynamic` applied as GPTQModel does."""
    values = {
        "bits": config.get("bits"),
        "group_size": config.get("group_size"),
        "sym": config.get("sym", True),
    }
    for pattern, changes in (config.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            continue
        if re.match(pattern.removeprefix("+:"), module):
            values.update({k: v for k, v in changes.items() if k in values})
            break
    bits, group_size, symmetric = values["bits"], values["group_size"], values["sym"]
    if bits not in (2, 3, 4, 8):
        raise CheckpointError(f"{where}: module {module!r}: {bits!r} bits; loopq reads 2, 3, 4 and 8")
    if not isinstance(group_size, int) or (group_size != -1 and group_size < 1):
        raise CheckpointError(f"{where}: module {module!r}: group_size {group_size!r}")
    if config.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(f"{where}: pack_dtype {config['pack_dtype']!r}; loopq reads int32")
    return int(bits), int(group_size), bool(symmetric)


FORMATS.register("gptq")(GPTQ(1))
FORMATS.register("gptq_v2")(GPTQ(2))
