"""bfloat16 checkpoints on processors that have no instructions for it."""

from __future__ import annotations

import pytest
import torch

import loopq
from loopq.models import precision
from loopq.models.load import load_model
from loopq.storage.files import read_tensors


@pytest.fixture
def spec(tmp_path):
    """A looped model of a class of transformers, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return f"looped:{tmp_path / 'model'}[1:3]x2"


@pytest.mark.parametrize("able", [False, True])
def test_a_bfloat16_model_computes_in_float32_and_is_stored_as_it_was(
    spec, tmp_path, monkeypatch, tokens, able
):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: able)
    loaded = load_model(spec)
    assert loaded.report.dtype == ("bfloat16" if able else "float32")
    assert any("computed in float32" in line for line in loaded.report.lines()) != able
    assert load_model(spec, dtype="bfloat16").report.dtype == "bfloat16"
    loopq.quantize(loaded, tokens.take(0, 2), method="rtn", group_size=20, out=tmp_path / "out")
    stored, found = (
        read_tensors(tmp_path / "model" / "model.safetensors"),
        read_tensors(tmp_path / "out" / "model.safetensors"),
    )
    dense = [name for name in stored if name in found]
    assert dense
    for name in dense:
        assert found[name].dtype == stored[name].dtype == "BF16"
        assert found[name].data.tobytes() == stored[name].data.tobytes()


def test_what_memory_does_not_allow_is_said(spec, monkeypatch):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(precision, "available_bytes", lambda: 1)
    loaded = load_model(spec)
    assert loaded.report.dtype == "bfloat16"
    assert any("0.0 are free" in line for line in loaded.report.lines())
