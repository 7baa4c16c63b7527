"""bfloat16 checkpoints on processors that have no instructions for it."""

from __future__ import annotations

import pytest
import torch

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.models import precision
from loopq.models.load import load_model
from loopq.settings.execution import Execution
from loopq.storage.files import read_tensors
from loopq.storage.model_files import is_streamed, model_tensors
from tests.support.vendors import inkling


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
def test_a_bfloat16_model_computes_in_float32_and_keeps_its_type(spec, tmp_path, monkeypatch, tokens, able):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: able)
    loaded = load_model(spec)
    assert loaded.report.dtype == ("bfloat16" if able else "float32")
    assert any("computed in float32" in line for line in loaded.report.lines()) != able
    assert load_model(spec, dtype="bfloat16").report.dtype == "bfloat16"
    loopq.quantize(loaded, tokens.take(0, 2), method="rtn", group_size=20, out=tmp_path / "out")
    stored = read_tensors(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {"BF16"}
    _same_types(stored, read_tensors(tmp_path / "out" / "model.safetensors"))


def _same_types(stored, tensors):
    dense = [name for name in stored if name in tensors]
    assert dense
    for name in dense:
        assert (tensors[name].dtype, tensors[name].data.tobytes()) == (
            stored[name].dtype,
            stored[name].data.tobytes(),
        )


@pytest.mark.parametrize("memory", [None, 1])
def test_float32_on_request_leaves_types_of_the_files(spec, tmp_path, tokens, memory):
    loaded = load_model(spec, dtype="float32", memory=memory)
    assert is_streamed(loaded.model) == (memory is not None)
    assert loaded.report.dtype == "float32"
    loopq.quantize(loaded, tokens.take(0, 2), method="rtn", group_size=20, out=tmp_path / "out")
    stored = read_tensors(tmp_path / "model" / "model.safetensors")
    _same_types(stored, read_tensors(tmp_path / "out" / "model.safetensors"))
    plan = Collection(loaded.system, tokens.take(0, 2), select(loaded.system, tokens), Execution(), {})
    collect_rows(plan, tmp_path / "dump")
    _same_types(stored, read_tensors(tmp_path / "dump" / "model" / "model.safetensors"))


def test_values_that_a_narrow_type_lacks_stay_float32(spec):
    model = load_model(spec, dtype="float32").model
    name = "model.norm.weight"
    assert model_tensors(model)[0][name].dtype == "BF16"
    with torch.no_grad():
        model.get_parameter(name)[0] = 1 + 2**-20
    assert model_tensors(model)[0][name].dtype == "F32"


def test_stacked_experts_in_float32_keep_the_type_of_the_file(tmp_path):
    inkling().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for memory in (None, 1):
        tensors = model_tensors(load_model(tmp_path / "model", dtype="float32", memory=memory).model)[0]
        assert any(".experts." in name for name in tensors)
        assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}


def test_what_memory_does_not_allow_is_said(spec, monkeypatch):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(precision, "available_bytes", lambda: 1)
    loaded = load_model(spec)
    assert loaded.report.dtype == "bfloat16"
    assert any("0.0 are free" in line for line in loaded.report.lines())
