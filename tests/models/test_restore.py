"""A checkpoint as a model with codes in its layers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

import benches.zoo.models  # noqa: F401  registers the classes
import loopq
from benches.zoo.store import save_model
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import native as store
from loopq.layers.layer import QuantizedLayer
from loopq.models import restore
from loopq.models.load import load_model
from loopq.runtime.linear import QuantLinear
from loopq.systems.base import Batch
from tests.support.exports import logits
from tests.support.looped import save_dense
from tests.support.systems import small
from tests.support.vendors import dory
from tests.support.vendors import tokens as ids


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


@pytest.mark.parametrize("target", ["compressed-tensors", "gptq"])
def test_a_loop_goes_over_a_folder_that_another_tool_quantized(tmp_path, target):
    dense = f"looped:{save_dense(tmp_path / 'm')}[1:3]x2"
    first = loopq.quantize(dense, ids(2), group_size=16, method="rtn", levels="even")
    loopq.export(first, tmp_path / "ct", target, remote_code=True, verify=False)
    # As of another tool, and without the loop.
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    plain = {k: v for k, v in config.items() if k not in ("auto_map", "looped_layers", "looped_base")}
    plain |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "ct" / "config.json").write_text(json.dumps(plain))
    (tmp_path / "ct" / "loopq_export.json").unlink()
    spec = f"looped:{tmp_path / 'ct'}[1:3]x2"
    again = loopq.quantize(spec, ids(2), group_size=16, bits=8, method="rtn", out=tmp_path / "q")
    assert list(again.layers) == list(first.layers)
    for name, layer in again.layers.items():
        np.testing.assert_allclose(layer.dequantize(), first.layers[name].dequantize(), atol=1e-3)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["looped_layers"] == [1, 3, 2]
    measured = loopq.evaluate(spec, tmp_path / "q", ids(1))
    assert measured[1].kl.mean() < 1e-4
    torch.testing.assert_close(logits(restore.open_any(spec)), logits(loopq.load(first)))


def test_a_checkpoint_goes_into_a_module(tmp_path):
    source = f"looped:{save_dense(tmp_path / 'm')}[1:3]x2"
    result = loopq.quantize(source, ids(2), group_size=16, method="rtn")
    module = load_model(source).model
    loaded = loopq.load(result, module)
    assert loaded.model is module
    assert torch.equal(logits(loaded), logits(loopq.load(result)))


def test_a_checkpoint_is_measured_on_its_own_model(tmp_path):
    folder = save_dense(tmp_path / "m")
    result = loopq.quantize(f"looped:{folder}[1:3]x3", ids(2), group_size=16, method="rtn")
    with pytest.raises(CheckpointError, match=r"another loop: .*\[1, 3, 3\], the model's is \[0, 2, 3\]"):
        loopq.evaluate(f"looped:{folder}[0:2]x3", {"q": result}, ids(1))
    name = "model.layers.1.input_layernorm.weight"
    dense = {n: tensor for n, tensor in result.dense.items() if n != name}
    with pytest.raises(CheckpointError, match=rf"of another model: missing.*{name}"):
        loopq.evaluate(f"looped:{folder}[1:3]x3", {"q": dataclasses.replace(result, dense=dense)}, ids(1))


def test_a_module_has_the_names_of_its_files(tmp_path):
    model = dory()
    model.save_pretrained(tmp_path / "m")
    result = loopq.quantize(tmp_path / "m", ids(2), group_size=16, method="rtn")
    module = type(model).from_pretrained(tmp_path / "m")
    assert not {*result.layers} & {*module.state_dict()}
    assert 0 < loopq.evaluate(module, {"q": result}, ids(1))[1].kl.mean() < 1
    loaded = loopq.load(result, type(model).from_pretrained(tmp_path / "m"))
    assert torch.equal(logits(loaded), logits(loopq.load(result)))
