"""Folders as transformers lays them out: config.json, safetensors in one file or in shards, everything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopq.checkpoint.files import (
    RawTensor,
    read_json,
    read_tensors,
    replacing,
    write_json,
    write_tensors,
)
from loopq.checkpoint.model_files import TENSORS
from loopq.errors import CheckpointError

CONFIG = "config.json"
QUANTIZE_CONFIG = "quantize_config.json"
SHARDS = "model.safetensors.index.json"
KEY = "quantization_config"


def weight_files(folder: Path) -> list[Path]:
    """Files that hold the tensors: those of the index, or the one safetensors file.

    Raises
    ------
    CheckpointError
        There is none, or more than one and no index; pickled weights are not read.
    """
    index = folder / SHARDS
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index}: no weight_map")
        files = [folder / str(n) for n in sorted(set(names.values()))]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {missing[0]} is missing; {SHARDS} names it")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if (folder / TENSORS) in files:
        return [folder / TENSORS]
    if len(files) == 1:
        return files
    if not files:
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {pickled[0]} is a pickle, which can run code: convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{folder}: no safetensors file{hint}")
    raise CheckpointError(f"{folder}: {len(files)} safetensors files and no {SHARDS}")


def read_all_tensors(folder: Path) -> dict[str, RawTensor]:
    """Read every tensor, each name once over all shards, and exactly those that the index names."""
    tensors: dict[str, RawTensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_tensors(path).items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name!r} is in another shard too")
            tensors[name] = tensor
    if (folder / SHARDS).is_file():
        lost = set(read_json(folder / SHARDS)["weight_map"]) - set(tensors)
        if lost:
            raise CheckpointError(f"{folder}: tensor {min(lost)!r} is in {SHARDS} and in no shard")
    return tensors


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read config.json.

    Returns
    -------
    config : dict
        Without the quantization config.
    quantization : dict or None
        The quantization config, here or in quantize_config.json; None where the model is not quantized.
    """
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG}: not a JSON object")
    quantization = config.pop(KEY, None)
    if quantization is None and (folder / QUANTIZE_CONFIG).is_file():
        quantization = {"quant_method": "gptq", **read_json(folder / QUANTIZE_CONFIG)}
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(f"{folder / CONFIG}: {KEY} is not a JSON object")
    return config, quantization


def side_files(folder: Path, leave_out: frozenset[str]) -> dict[str, bytes]:
    """Read the files beside the weights: tokenizer, remote code, generation config."""
    weights = {SHARDS, CONFIG, QUANTIZE_CONFIG, *leave_out}
    files = (p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith("."))
    return {
        p.name: p.read_bytes()
        for p in files
        if p.name not in weights and p.suffix not in (".safetensors", ".bin")
    }


def write_files(
    folder: Path,
    tensors: Mapping[str, RawTensor],
    config: Mapping[str, Any],
    side: Mapping[str, bytes],
    texts: Mapping[str, str],
) -> None:
    """Write weights, config.json in the order of its keys, side files byte for byte, and texts."""
    for name, data in side.items():
        with replacing(folder / name) as path:
            path.write_bytes(data)
    for name, text in texts.items():
        with replacing(folder / name) as path:
            path.write_text(text, "utf-8")
    with replacing(folder / CONFIG) as path:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    write_tensors(folder / TENSORS, tensors, {"format": "pt"})
    if config.get(KEY, {}).get("quant_method") == "gptq":
        write_json(folder / QUANTIZE_CONFIG, config[KEY])
