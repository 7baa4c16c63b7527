"""A checkpoint as a model with codes in its layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import benches.zoo.models  # noqa: F401  registers the classes
import loopq
from benches.zoo.store import save_model
from loopq.errors import ConfigError
from loopq.formats import native as store
from loopq.layers.layer import QuantizedLayer
from loopq.runtime.linear import QuantLinear
from loopq.systems.base import Batch
from tests.support.exports import logits
from tests.support.systems import small


def test_quantized_modules_hold_codes_and_give_the_same_logits(solved):
    dense, packed = loopq.load(solved), loopq.load(solved, quantized=True)
    assert packed.report.notes == ()
    modules = dict(packed.model.named_modules())
    whole = store.read(solved)
    for layer in whole.layers.values():
        module = modules[layer.module]
        assert isinstance(module, QuantLinear)
        np.testing.assert_array_equal(module.dequantize().numpy(), layer.dequantize())
    assert torch.allclose(logits(dense), logits(packed), rtol=1e-5, atol=1e-5)
    assert not any(n.endswith("adapter.weight") for n in packed.model.state_dict())


def test_layers_whose_codes_are_kept_are_not_dequantized(solved, monkeypatch):
    def refuse(layer):
        raise AssertionError(f"{layer.name} was dequantized")

    monkeypatch.setattr(QuantizedLayer, "in_model_orientation", refuse)
    loopq.load(solved, quantized=True)
    with pytest.raises(AssertionError, match="was dequantized"):
        loopq.load(solved)


@pytest.mark.parametrize(
    "name", ["huginn", "loopformer", "mamba", "nanbeige", "ouro", "parcae", "ponder", "rllama"]
)
def test_systems_roll_out_models_that_hold_codes(name, tmp_path):
    out = tmp_path / "q"
    save_model(small(name)().eval(), tmp_path / "model")
    loopq.quantize(tmp_path / "model", out=out, method="rtn", n_prompts=2, seq_len=16, group_size=32)
    dense, packed = loopq.load(out), loopq.load(out, quantized=True)
    batch = Batch(torch.arange(20).reshape(2, 10), prompts=(0, 1))
    n_steps = min(2, dense.system.n_steps)
    with torch.no_grad():
        a, b = dense.system.rollout(batch, n_steps), packed.system.rollout(batch, n_steps)
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"symmetric": False}, {"symmetric": False, "bits": 3, "group_size": -1},
                                      {"rotation": "hadamard:16"}, {"method": "awq", "symmetric": False}])  # fmt: skip
def test_asymmetric_and_transformed_layers_keep_codes(tiny_folder, tokens, tmp_path, settings):
    out = tmp_path / "q"
    loopq.quantize(tiny_folder, tokens, out=out, **{"method": "rtn", "group_size": 16} | settings)
    dense, loaded = loopq.load(out), loopq.load(out, quantized=True)
    assert loaded.report.notes == ()
    modules, whole = dict(loaded.model.named_modules()), store.read(out)
    assert any(layer.zeros is not None or layer.transform is not None for layer in whole.layers.values())
    for layer in whole.layers.values():
        module = modules[layer.module]
        assert isinstance(module, QuantLinear)
        np.testing.assert_array_equal(module.dequantize().numpy(), layer.stored_values())
    torch.testing.assert_close(logits(dense), logits(loaded), rtol=1e-4, atol=1e-4)


def test_eight_bit_activations_go_with_codes(solved):
    with pytest.raises(ConfigError, match="activations='int8' is for loading codes: give quantized=True"):
        loopq.load(solved, activations="int8")
