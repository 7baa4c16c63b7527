"""Layers and checkpoints with made numbers."""

from __future__ import annotations

import json

import numpy as np

from loopq.formats.checkpoint import Checkpoint
from loopq.layers.grids import even
from loopq.layers.layer import QuantizedLayer
from loopq.run.config import QuantConfig
from loopq.storage.files import RawTensor, read_json, write_json
from loopq.storage.schema import sealed

_TYPES = {"float16": np.float16, "float32": np.float32}


def layer(
    rows, columns, bits=4, group_size=32, symmetric=True, name="a.b.weight", scale_dtype="float16", seed=0
):
    """A layer with codes of every value, including the outermost."""
    rng = np.random.default_rng(seed)
    n_groups = 1 if group_size == -1 else -(-columns // group_size)
    codes = rng.integers(0, 1 << bits, (rows, columns))
    codes.flat[0], codes.flat[-1] = 0, (1 << bits) - 1
    scales = rng.uniform(0.01, 0.2, (rows, n_groups)).astype(np.float32)
    if scale_dtype == "bfloat16":
        scales = (scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    else:
        scales = scales.astype(_TYPES[scale_dtype]).astype(np.float32)
    scales[::3] *= -1
    zeros = None if symmetric else rng.integers(0, 1 << bits, (rows, n_groups)).astype(np.uint8)
    stored = (codes - (1 << (bits - 1))).astype(np.int8) if symmetric else codes.astype(np.uint8)
    grid = even(bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    return QuantizedLayer(name, grid, stored, scales, zeros, report={"n": 1})


def checkpoint(*layers, ties=None, dense=None):
    """A checkpoint of layers, with an embedding, a norm and an exit gate left dense."""
    rng = np.random.default_rng(1)
    tensors = {
        "embed.weight": RawTensor.of(rng.normal(size=(11, 8)).astype(np.float32)),
        "norm.weight": RawTensor.of(np.ones(8, np.float16)),
        "early_exit_gate.weight": RawTensor.of(rng.normal(size=(1, 8)).astype(np.float32)),
        "early_exit_gate.bias": RawTensor.of(np.zeros(1, np.float32)),
        **(dense or {}),
    }
    config = json.dumps({"model_type": "made", "hidden_size": 8, "name": "größe"}, indent=4).encode()
    settings = {
        "system": "made",
        "n_steps": 3,
        "seed": 3,
        "calibration": {"n_prompts": 2, "n_tokens": 16, "source": "made"},
        "quantization": QuantConfig.of(method="gptq").to_json(),
    }
    side = {"config.json": config, "tokenizer.json": b'{"a": 1}', "modeling_made.py": b"# code\n"}
    return Checkpoint({x.name: x for x in layers}, tensors, ties or {}, settings, side)


def dequantized(values):
    """(u - z) * s in float64, from first principles."""
    columns = values.shape[1]
    index = np.arange(columns) // values.grid.width(columns)
    zeros = 0 if values.zeros is None else values.zeros.astype(np.float64)[:, index]
    return (values.codes.astype(np.float64) - zeros) * values.scales.astype(np.float64)[:, index]


def reseal(path, change):
    """Change a file that protects itself, and its SHA-256 with it."""
    data = read_json(path)
    change(data)
    data.pop("sha256")
    write_json(path, sealed(data["format"], data))
