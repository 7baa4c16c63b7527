"""Quantized folders as sources: read exactly, kept bit for bit, and in loopq's own format only on request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.formats.convert import read_any
from loopq.formats.record import RECORD
from loopq.run.kept import Kept
from loopq.storage.files import RawTensor, map_tensors
from loopq.systems.base import Batch
from tests.support.checkpoints import checkpoint, layer
from tests.support.vendors import dory, tokens

SETTINGS = {"group_size": 16, "method": "rtn"}


def _foreign(folder: Path) -> Path:
    """A compressed-tensors folder as another tool would write it."""
    dory().save_pretrained(folder / "dory")
    result = loopq.quantize(folder / "dory", tokens(2), bits=8, **SETTINGS)
    loopq.export(result, folder / "ct", "compressed-tensors", verify=False)
    (folder / "ct" / RECORD).unlink()
    return folder / "ct"


def test_codes_of_another_tool_are_read_exactly_and_kept(tmp_path: Path) -> None:
    source = _foreign(tmp_path)
    batch = Batch(torch.from_numpy(tokens(1)), (0,))
    expected = loopq.load(source).system.rollout(batch, 3)
    result = loopq.quantize(
        source, tokens(2), keep=("*g_proj*", "*embeddings*"), out=tmp_path / "out", **SETTINGS
    )
    before, after = (map_tensors(f / "model.safetensors") for f in (source, tmp_path / "out"))
    kept = [name for name in after if "g_proj" in name]
    assert len(kept) == 4 * 3
    assert all(np.array_equal(after[name].data, before[name].data) for name in kept)
    assert {layer.grid.bits for name, layer in result.layers.items() if "g_proj" not in name} == {4}
    logits = loopq.load(tmp_path / "out").system.rollout(batch, 3)
    assert 0 < (logits - expected).norm() < 0.2 * expected.norm()
    with pytest.raises(ConfigError, match="keep"):
        loopq.quantize(source, tokens(2), keep=("*nothing*",), **SETTINGS)


def test_awq_is_a_source(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    tensors = load_file(tmp_path / "model.safetensors")
    module = "backbone.layers.1.mlp.up_proj"
    codes = rng.integers(0, 16, (32, 48)).astype(np.uint32)
    zeros = rng.integers(0, 16, (2, 48)).astype(np.uint32)
    scales = (rng.random((2, 48)) * 0.1 + 0.01).astype(np.float16)

    def packed(values: np.ndarray) -> torch.Tensor:
        # Nibbles of a word hold the outputs 0, 2, 4, 6, 1, 3, 5, 7.
        parts = values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        words = (parts << (4 * np.arange(8, dtype=np.uint32))).sum(-1).astype(np.uint32)
        return torch.from_numpy(words.view(np.int32).copy())

    del tensors[f"{module}.weight"]
    tensors |= {
        f"{module}.qweight": packed(codes), f"{module}.qzeros": packed(zeros),
        f"{module}.scales": torch.from_numpy(scales),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight = read_any(tmp_path).layers[f"{module}.weight"].dequantize()
    spread = scales.astype(np.float32).repeat(16, 0)
    expected = (codes.astype(np.float32) - zeros.astype(np.float32).repeat(16, 0)) * spread
    np.testing.assert_array_equal(weight, expected.T)


def test_own_output_is_refused_unless_that_is_asked_for(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path / "dory")
    result = loopq.quantize(tmp_path / "dory", tokens(2), bits=8, out=tmp_path / "own", **SETTINGS)
    with pytest.raises(CheckpointError, match="requantize"):
        loopq.quantize(tmp_path / "own", tokens(2), **SETTINGS)
    again = loopq.quantize(tmp_path / "own", tokens(2), bits=8, requantize=True, **SETTINGS)
    name = next(iter(result.layers))
    np.testing.assert_allclose(again.layers[name].dequantize(), result.layers[name].dequantize(), atol=1e-2)


def test_fp8_of_another_tool_is_a_source(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = loopq.quantize(tmp_path, tokens(2), bits=8, group_size=16, method="rtn")
    name = "backbone.layers.1.mlp.up_proj.weight"
    expected = (tensors[name].float() * tensors[f"{name}_scale"]).numpy()
    np.testing.assert_allclose(result.layers[name].dequantize(), expected, atol=2e-3)


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep: the model comes from no folder"):
        Kept.of(None, ("*",))
    tensor = RawTensor.of(np.ones(2, np.float32))
    whole = checkpoint(layer(8, 32))
    with pytest.raises(CheckpointError, match=r"keep: fused\.weight is made into other tensors at loading"):
        Kept({}, {"fused.weight": tensor}).put(whole)
