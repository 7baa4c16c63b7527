"""transformers loads and saves native checkpoints as codes, after `import loopq.runtime.transformers`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import loopq
import loopq.runtime.transformers  # registers the quantizer
from loopq.errors import CheckpointError
from loopq.formats.checkpoint import load_into
from loopq.formats.convert import read_any, write_as
from loopq.formats.hf_folder import read_all_tensors
from loopq.layers.grids.trellis import OnTrellis, Trellis
from loopq.models.stream import unfuse
from loopq.runtime.linear import QuantLinear
from loopq.runtime.quantized import QuantEmbedding
from loopq.systems.base import Batch
from tests.support.interop import models
from tests.support.systems import CASES, build

pytestmark = pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels|use_mamba).*")

ON_TRELLIS = OnTrellis(2, 32, "float16", Trellis(8, 512))
_IDS = torch.tensor([[5, 9, 7, 30, 11, 12], [1, 2, 3, 4, 5, 6]])


def _logits(model):
    with torch.no_grad():
        return model(_IDS, use_cache=False).logits


def _from_case(name):
    model = build(CASES[name])
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return model, config, {}


def _experts(kind):
    """A model as the loader gives it: each expert's matrices apart, named as in its files."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes)
    ).eval()
    unfuse(model)
    return model, model.config.to_dict() | {"architectures": [type(model).__name__]}, {}


def _code():
    return models.looped_code()


BUILT = {
    "Llama": lambda: (*models.tiny_llama(), {}),
    "HRM-Text": lambda: (*models.tiny_hrm(), {}),
    "code of its own": _code,
    "Zamba, tied modules": lambda: _from_case("transformers Zamba"),
    "GPT-NeoX, biases": lambda: _from_case("transformers GPT-NeoX Ponder"),
    "OLMoE, experts": lambda: _experts("Olmoe"),
    "Mixtral, experts under other names": lambda: _experts("Mixtral"),
}
#: Models that no looped system fits: `loopq.load` takes them with the generic one.
GENERIC = ("Llama", "code of its own", "OLMoE, experts", "Mixtral, experts under other names")
GRIDS = {
    "INT4": {"bits": 4, "group_size": 16},
    "INT3 asymmetric, ragged": {"bits": 3, "group_size": 24, "symmetric": False},
}


def _products(model):
    """A list that grows by one at every product with packed codes."""
    calls = []
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", BUILT)
def test_logits_are_those_of_load_and_saving_keeps_the_codes(name, grid, tmp_path):
    model, config, files = BUILT[name]()
    checkpoint = models.checkpoint_of(model, config, side=files, **GRIDS[grid])
    checkpoint.settings["system"] = "generic" if name in GENERIC else None
    write_as(tmp_path / "q", checkpoint, "native")
    load_into(model, checkpoint)
    reloaded, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", trust_remote_code=True, output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert {type(reloaded.get_submodule(n.removesuffix(".weight"))) for n in checkpoint.layers} == {
        QuantLinear
    }
    loaded = loopq.load(tmp_path / "q", quantized=True, trust_remote_code=True).model
    products = _products(reloaded)
    logits = _logits(reloaded)
    assert torch.equal(logits, _logits(loaded))
    # A product rounds its input to 2^-22 of the block's largest value (docs/cpu.md); the dequantized model does not.
    # One such error of the logits for each product is three times what was measured at most.
    expected = _logits(model)
    bound = len(products) * 2**-22 * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
    reloaded.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert torch.equal(_logits(again), _logits(reloaded))
    with pytest.raises(CheckpointError, match=r"saves them again: give the folder that loopq wrote"):
        loopq.load(tmp_path / "saved")
    packed, saved = (read_all_tensors(tmp_path / folder) for folder in ("q", "saved"))
    for tensor_name, tensor in packed.items():
        assert saved[tensor_name].data.tobytes() == tensor.data.tobytes()


def test_codes_on_a_trellis_are_kept_and_saved_as_they_were(tmp_path):
    model, config = models.tiny_llama()
    checkpoint = models.checkpoint_of(model, config, bits=2, group_size=32)
    for name, layer in checkpoint.layers.items():
        checkpoint.layers[name] = dataclasses.replace(layer, grid=ON_TRELLIS)
    write_as(tmp_path / "q", checkpoint, "native")
    load_into(model, checkpoint)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    assert all(isinstance(reloaded.get_submodule(x.module), QuantLinear) for x in checkpoint.layers.values())
    torch.testing.assert_close(_logits(reloaded), _logits(model), rtol=1e-5, atol=1e-5)
    reloaded.save_pretrained(tmp_path / "saved")
    packed, saved = (read_all_tensors(tmp_path / folder) for folder in ("q", "saved"))
    assert {n: saved[n].data.tobytes() == t.data.tobytes() for n, t in packed.items()} == dict.fromkeys(
        packed, True
    )


#: The smallest files that `loopq quantize` writes, with fewer states than `--preset small` has.
SMALLEST = {
    "trellis": {"method": "trellis", "state_bits": 8, "rotation": "hadamard", "bits": 3, "outside": 8},
    "uneven": {"preset": "fast", "levels": "uneven", "bits": 3},
}
LOAD = """
import sys
import numpy as np, torch
import loopq.runtime.transformers
from transformers import AutoModelForCausalLM
folder, ids, out = sys.argv[1:]
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(folder)(torch.from_numpy(np.load(ids)), use_cache=False).logits
np.save(out, logits.numpy())
"""


@pytest.mark.parametrize("kind", SMALLEST)
def test_the_smallest_files_of_a_loop_load_in_a_process(kind, tmp_path):
    models.tiny_llama()[0].save_pretrained(tmp_path / "m")
    ids = np.random.default_rng(0).integers(3, 64, (8, 12))
    np.save(tmp_path / "ids.npy", ids)
    spec = f"looped:{tmp_path / 'm'}[0:2]x3"
    loopq.quantize(spec, ids.tolist(), out=tmp_path / "q", group_size=32, **SMALLEST[kind])
    paths = [str(tmp_path / name) for name in ("q", "ids.npy", "logits.npy")]
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True, capture_output=True)
    loaded = loopq.load(tmp_path / "q", quantized=True)
    layers = [module for module in loaded.model.modules() if isinstance(module, QuantLinear)]
    grids = [module.held.grid for module in layers]
    assert any(not grid.plain if kind == "trellis" else grid.levels is not None for grid in grids)
    assert any(module.transform is not None for module in layers)
    with torch.no_grad():
        own = loaded.system.rollout(
            Batch(torch.from_numpy(ids), tuple(range(len(ids)))), loaded.system.n_steps
        )
    assert np.array_equal(np.load(tmp_path / "logits.npy"), own.numpy())


def test_a_table_on_a_trellis_is_dequantized(tmp_path):
    model, config = models.tiny_llama(tie_word_embeddings=True)
    checkpoint = models.checkpoint_of(model, config, bits=4, group_size=32)
    name = "model.embed_tokens.weight"
    table = models.rounded(
        name, model.get_parameter(name).detach().numpy(), bits=2, group_size=32, orientation="table"
    )
    checkpoint.layers[name] = dataclasses.replace(table, grid=ON_TRELLIS)
    del checkpoint.dense[name]
    checkpoint.settings["system"] = "generic"
    write_as(tmp_path / "q", checkpoint, "native")
    load_into(model, checkpoint)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    assert type(reloaded.get_input_embeddings()) is torch.nn.Embedding
    assert torch.equal(reloaded.lm_head.weight, model.get_input_embeddings().weight)
    torch.testing.assert_close(_logits(reloaded), _logits(model), rtol=1e-5, atol=1e-5)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight: of shape \[96, 64\], the model has \[80, 64\]"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32, vocab_size=80)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_tables_keep_codes_and_are_saved_unchanged(tied, tmp_path):
    model, config = models.tiny_llama(tie_word_embeddings=tied)
    checkpoint = models.checkpoint_of(model, config, bits=4, group_size=32)
    name = "model.embed_tokens.weight"
    table = model.get_parameter(name).detach().numpy()
    checkpoint.layers[name] = models.rounded(name, table, bits=8, group_size=32, orientation="table")
    del checkpoint.dense[name]
    checkpoint.settings["system"] = "generic"
    write_as(tmp_path / "q", checkpoint, "native")
    load_into(model, checkpoint)
    reloaded, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"]
    assert torch.equal(reloaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert isinstance(reloaded.get_input_embeddings(), QuantEmbedding)
    assert (reloaded.lm_head is reloaded.get_input_embeddings().table) == tied
    assert torch.equal(_logits(reloaded), _logits(loopq.load(tmp_path / "q", quantized=True).model))
    reloaded.save_pretrained(tmp_path / "saved")
    packed, saved = (read_all_tensors(tmp_path / folder) for folder in ("q", "saved"))
    assert set(packed) == set(saved)
    assert all(saved[n].data.tobytes() == t.data.tobytes() for n, t in packed.items())
    with pytest.raises(CheckpointError, match=r"of an embedding table .* compressed-tensors cannot hold"):
        loopq.export(tmp_path / "q", tmp_path / "ct", "compressed-tensors")


def test_scales_in_16_bits_are_unchanged_in_a_bfloat16_model(tmp_path):
    model, config = models.tiny_llama("bfloat16")
    checkpoint = models.checkpoint_of(model, config, bits=4, group_size=32, scale_dtype="float16")
    write_as(tmp_path / "q", checkpoint, "native")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype="auto")
    for name, layer in checkpoint.layers.items():
        module = reloaded.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(module.dequantize(), torch.from_numpy(layer.dequantize()))


def test_config_json_says_how_to_load_and_round_trips_exactly(tmp_path):
    model, config = models.tiny_llama()
    checkpoint = models.checkpoint_of(model, config, bits=4, group_size=32)
    write_as(tmp_path / "q", checkpoint, "native")
    data = json.loads((tmp_path / "q" / "config.json").read_bytes())
    quantization = data.pop("quantization_config")
    assert data == json.loads(checkpoint.side_files["config.json"])
    assert quantization["quant_method"] == "loopq"
    (group,) = quantization["groups"]
    assert group["layers"] == list(checkpoint.layers)
    assert (group["bits"], group["group_size"]) == (4, 32)
    assert read_any(tmp_path / "q").side_files == checkpoint.side_files


def test_a_method_that_is_not_loopqs_is_refused(tmp_path):
    """transformers would follow it, and make up the weights."""
    model, config = models.tiny_llama()
    checkpoint = models.checkpoint_of(model, config, bits=4, group_size=32)
    checkpoint.side_files["config.json"] = b'{"architectures": ["A"], "quantization_config": {}}'
    with pytest.raises(CheckpointError, match="quantize the source again"):
        write_as(tmp_path / "q", checkpoint, "native")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("text", [b'{"model_type": "other"}', b"[]"])
def test_other_configs_stay_as_they_are(text, tmp_path):
    model, config = models.tiny_llama()
    checkpoint = models.checkpoint_of(model, config, side={"config.json": text}, bits=4, group_size=32)
    checkpoint.side_files["config.json"] = text
    write_as(tmp_path / "q", checkpoint, "native")
    assert (tmp_path / "q" / "config.json").read_bytes() == text


def test_a_layer_that_is_no_linear_module_is_refused(tmp_path):
    model, config = models.tiny_llama()
    checkpoint = models.checkpoint_of(model, config, bits=4, group_size=32)
    write_as(tmp_path / "q", checkpoint, "native")
    path = tmp_path / "q" / "config.json"
    path.write_text(
        path.read_text().replace("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.weight")
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp is LlamaMLP, not nn\.Linear"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q")
