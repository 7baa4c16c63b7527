"""Inkling-2-Mini: gates of messages, experts, float32 gates, the padded head, any number of passes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import loopq
from loopq.models.check import check_model
from loopq.models.load import load_model
from loopq.storage.files import map_tensors
from loopq.systems.base import Batch
from tests.support.vendors import check_round_trip, inkling, inkling_config, logits, mxfp8, nvfp4, tokens


@pytest.mark.slow
def test_round_trip(tmp_path: Path) -> None:
    inkling().save_pretrained(tmp_path / "inkling")
    result = check_round_trip(tmp_path / "inkling", tmp_path)
    before = map_tensors(tmp_path / "inkling" / "model.safetensors")
    assert before["model.llm.unembed.weight"].shape == (72, 32)
    assert result.dense["model.llm.unembed.weight"].shape == (72, 32)
    experts = [name for name in result.layers if ".experts." in name]
    assert len(experts) == 6 * 4 * 3
    assert "model.llm.layers.2.mlp.experts.3.down_proj.weight" in experts
    assert result.dense["model.llm.layers.2.controllers.k.gain_weight"].dtype == "F32"
    assert "model.llm.layers.2.controllers.k.down_weight" in result.layers


def test_any_number_of_passes(tmp_path: Path) -> None:
    inkling().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    for passes in (1, 2, 4):
        report = check_model(loaded, n_steps=passes)
        assert report.ok, report.lines()
        shared = loaded.system.shared_parameters(passes)
        gates = {p.invocations for p in shared if p.role == "message"}
        assert gates == ({passes - 1} if passes > 1 else set())
        assert {p.invocations for p in shared if p.role == "expert"} == {1, passes}


def test_a_loop_with_full_attention_forgets_nothing(tmp_path: Path) -> None:
    inkling(num_hidden_layers=8, loop_layer_index_end=6).save_pretrained(tmp_path)
    report = check_model(load_model(tmp_path))
    assert report.ok, report.lines()


def test_bfloat16_leaves_float32_gates_and_codes_multiply(tmp_path: Path) -> None:
    inkling().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    loaded = load_model(tmp_path / "half", dtype="bfloat16")
    gate = loaded.model.model.layers[2].q_message_gate
    assert (gate.message_gate_proj.weight.dtype, gate.down_proj.weight.dtype) == (
        torch.float32,
        torch.bfloat16,
    )
    result = loopq.quantize(loaded, tokens(2), group_size=16, method="rtn", out=tmp_path / "out")
    # The model computes it in float32, and it is written as the file has it.
    assert result.dense["model.llm.layers.2.controllers.v.forget_weight"].dtype == "BF16"
    coded = loopq.load(tmp_path / "out", quantized=True)
    batch = Batch(torch.from_numpy(tokens(1)), (0,))
    by_codes, expected = (m.system.rollout(batch, 3) for m in (coded, loopq.load(tmp_path / "out")))
    assert coded.model.model.layers[2].q_message_gate.down_proj.weight.dtype == torch.bfloat16
    # Weights rounded to bfloat16 choose other experts now and then.
    assert (by_codes - expected).norm() < 0.5 * expected.norm()


def test_the_text_model_inside_one_with_images(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    vision = {"model_type": "inkling2_vision", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
              "num_attention_heads": 2, "text_hidden_size": 32}  # fmt: skip
    config = transformers.Inkling2LoopConfig(
        text_config=inkling_config(), vision_config=vision, image_token_id=60
    )
    torch.manual_seed(0)
    model = transformers.Inkling2LoopForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    loaded = load_model(tmp_path / "whole")
    assert loaded.system.name == "inkling"
    assert check_model(loaded).ok
    result = loopq.quantize(loaded, tokens(2) % 50, group_size=16, method="rtn", out=tmp_path / "out")
    before = map_tensors(tmp_path / "whole" / "model.safetensors")
    assert set(result.dense) <= set(before)
    assert any(name.startswith("model.visual.") for name in result.dense)
    again = loopq.load(tmp_path / "out")
    batch = Batch(torch.from_numpy(tokens(1) % 50), (0,))
    with torch.no_grad():
        expected = model(batch.input_ids, use_cache=False).logits
    assert (again.system.rollout(batch, 3) - expected).norm() < 0.3 * expected.norm()


def test_the_padded_head_is_rounded_without_its_padding(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    import loopq.runtime.transformers

    sizes = {"hidden_size": 64, "vocab_size": 136, "unpadded_vocab_size": 128}
    inkling(**sizes).save_pretrained(tmp_path / "inkling")
    settings = {"group_size": 16, "method": "rtn", "outside": 8}
    result = loopq.quantize(tmp_path / "inkling", tokens(2), out=tmp_path / "codes", **settings)
    assert result.layers["lm_head.weight"].shape == (128, 64)
    assert "model.llm.unembed.weight" not in result.dense
    coded = loopq.load(tmp_path / "codes", quantized=True)
    assert type(coded.model.lm_head).__name__ == "QuantLinear"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "codes", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        by_class = model.eval()(torch.from_numpy(tokens(1)), use_cache=False).logits
    torch.testing.assert_close(by_class, logits(coded), rtol=1e-4, atol=1e-4)


def test_published_experts_in_nvfp4_and_mxfp8_are_a_source(tmp_path: Path) -> None:
    model = inkling(moe_intermediate_size=32)
    model.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    exact: dict[str, torch.Tensor] = {}
    for key in [key for key in tensors if key.endswith(("w13_weight", "w2_weight"))]:
        # The loop's experts are in NVFP4, the others in MXFP8.
        in_loop = int(key.split(".layers.")[1].split(".")[0]) in (2, 3)
        stored, exact[key] = (nvfp4 if in_loop else mxfp8)(key, tensors.pop(key))
        tensors |= stored
    (tmp_path / "published").mkdir()
    save_file(tensors, tmp_path / "published" / "model.safetensors", {"format": "pt"})
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "published")
    kept = {key: t for key, t in tensors.items() if "_weight_" not in key and key not in exact}
    save_file(kept | exact, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    published, expected = (load_model(tmp_path / name) for name in ("published", "plain"))
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(published.model.get_parameter(name), parameter), name
    streamed = load_model(tmp_path / "published", memory=1)
    assert torch.equal(logits(streamed), logits(expected))
    settings = {"group_size": 16, "method": "rtn"}
    results = [loopq.quantize(m, tokens(2), **settings) for m in (published, expected, streamed)]
    assert len(results[0].layers) == len(results[1].layers)
    for result in results[1:]:
        assert all(layer.same_as(results[0].layers[name]) for name, layer in result.layers.items())


def test_export_holds_gates_whose_files_have_no_module_for_them(tmp_path: Path) -> None:
    inkling().save_pretrained(tmp_path / "inkling")
    result = loopq.quantize(tmp_path / "inkling", tokens(2), group_size=16, method="rtn")
    written = loopq.export(result, tmp_path / "ct", "compressed-tensors", force=True, verify=False)
    assert written.difference == 0.0
    stored = map_tensors(tmp_path / "ct" / "model.safetensors")
    assert "model.llm.layers.2.controllers.k.down_proj.weight_packed" in stored
    assert "model.llm.layers.0.mlp.experts.0.gate_proj.weight_packed" in stored
    (tmp_path / "ct" / "loopq_export.json").unlink()
    batch = Batch(torch.from_numpy(tokens(1)), (0,))
    exported, expected = (loopq.load(x).system.rollout(batch, 3) for x in (tmp_path / "ct", result))
    assert torch.equal(exported, expected)
