"""HRM-Text as GGUF: names and numbers of llama.cpp's own class."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import CheckpointError
from loopq.formats.convert import write_as
from loopq.formats.gguf.shape import Shape
from tests.support.interop import models

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")


def test_hrm_text_has_the_names_and_numbers_of_its_own_class(tmp_path):
    """Names of llama.cpp's converter and loader; the low stack comes first, and halves of heads stay halves."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    config = HrmTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_layers_per_stack=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, H_cycles=2, L_cycles=3,
    )  # fmt: skip
    torch.manual_seed(2)
    model = HrmTextForCausalLM(config).eval()
    settings = {**config.to_dict(), "architectures": ["HrmTextForCausalLM"]}
    checkpoint = models.checkpoint_of(model, settings, bits=4, levels="q5_0", group_size=32)
    write_as(tmp_path / "m.gguf", checkpoint, "gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    entries = {name.removeprefix("hrm_text."): field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "hrm_text", "block_count": 2 * 2 * (3 + 1), "hrm.layers_per_stack": 2,
        "hrm.h_cycles": 2, "hrm.l_cycles": 3, "hrm.prefix_lm": True, "embedding_scale": config.embedding_scale,
        "rope.dimension_count": 16, "context_length": config.max_position_embeddings,
    }  # fmt: skip
    assert {key: entries[key] for key in expected} == expected
    tensors = {t.name: t for t in reader.tensors}
    parts = ["attn_q", "attn_k", "attn_v", "attn_gate", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    names = {f"blk.{i}.{part}.weight" for i in range(4) for part in parts}
    assert set(tensors) == names | {"hrm.z_l_init", "token_embd.weight", "output.weight"}
    for stack, first in (("L", 0), ("H", 2)):
        layer = checkpoint.layers[f"model.{stack}_module.layers.1.self_attn.q_proj.weight"]
        value = tensors[f"blk.{first + 1}.attn_q.weight"]
        assert np.array_equal(gguf.quants.dequantize(value.data, value.tensor_type), layer.dequantize())
    with pytest.raises(CheckpointError, match=r"has no place in a GGUF of architecture hrm_text"):
        Shape.of(settings).tensors("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"config\.json: L_cycles is None"):
        Shape.of({**settings, "L_cycles": None}).check_whole()


def test_a_saved_folder_gives_the_same_file_quantized_or_not(tmp_path):
    """transformers saves two fused matrices (gate with q, k and v; gate with up), and `o_proj` under another
    name."""
    model, _ = models.tiny_hrm()
    model.save_pretrained(tmp_path / "m")
    ids = models.prompts().numpy()
    # The high stack stays dense.
    settings = {"method": "rtn", "levels": "q8_0", "group_size": 32, "exclude": "*H_module*"}
    result = loopq.quantize(tmp_path / "m", ids, **settings)
    write_as(tmp_path / "codes.gguf", result, "gguf")
    loopq.export(tmp_path / "m", tmp_path / "full.gguf", "gguf")
    coded, full = (
        {t.name: t for t in gguf.GGUFReader(tmp_path / f"{n}.gguf").tensors} for n in ("codes", "full")
    )
    assert set(coded) == set(full)
    assert coded["blk.0.attn_output.weight"].tensor_type.name == "Q8_0"
    parameters = dict(model.named_parameters())
    parts = {"attn_gate": "gate_proj", "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj"}
    for part, name in parts.items():
        expected = parameters[f"model.H_module.layers.1.self_attn.{name}.weight"].detach().numpy()
        for tensors in (coded, full):
            assert np.array_equal(tensors[f"blk.3.{part}.weight"].data, expected)
