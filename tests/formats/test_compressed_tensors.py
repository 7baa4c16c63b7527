"""compressed-tensors: the bit stream, what is ignored, codes beyond the last."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.convert import read_any, write_as
from loopq.formats.layouts import layout_of
from loopq.formats.record import Export
from loopq.layers.layer import TensorReader
from loopq.storage.files import RawTensor, read_json, read_tensors
from tests.support.formats import (
    CT,
    V2,
    as_words,
    broken,
    edit,
    stored_settings,
)

from ..support.checkpoints import checkpoint, layer
from ..support.interop import models


def test_spec_example_of_the_bit_stream():
    quantized = layer(1, 11, 3, -1, False)
    quantized.codes[0] = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 6]
    assert as_words(quantized.tensors()["a.b.weight_packed"]).tolist() == [[0x88FAC688, 0x00000001]]


def test_ignore_lists_every_dense_matrix_by_exact_name(tmp_path):
    whole = checkpoint(layer(8, 32), ties={"lm_head.weight": "embed.weight"})
    write_as(tmp_path / "ct", whole, "compressed-tensors")
    config = read_json(tmp_path / "ct" / "config.json")["quantization_config"]
    assert config["ignore"] == ["early_exit_gate", "embed", "lm_head"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    write_as(tmp_path / "gptq", whole, "gptq")
    config = read_json(tmp_path / "gptq" / "config.json")["quantization_config"]
    assert list(config["dynamic"]) == ["-:^early_exit_gate$", "-:^embed$", "-:^lm_head$"]
    assert config == read_json(tmp_path / "gptq" / "quantize_config.json")


@pytest.mark.parametrize(
    ("kind", "file", "loaded"),
    [
        ("dory", "backbone.layers.3.self_attn.g_proj", "model.layers.3.self_attn.gate_proj"),
        ("dory", "backbone.layers.6.mixer.o_proj", "model.layers.3.self_attn.o_proj"),
        ("dory", "backbone.layers.7.mixer.up_proj", "model.layers.3.mlp.up_proj"),
        ("hrm_text", "model.L_module.layers.0.attn.o_proj", "model.L_module.layers.0.self_attn.o_proj"),
        ("llama", "model.layers.0.self_attn.o_proj", None),
    ],
)
def test_targets_and_ignored_modules_have_transformers_names_too(kind, file, loaded):
    assert layout_of({"model_type": kind}).loaded([file]) == ({} if loaded is None else {file: loaded})
    weight = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    names = (file, "model.experts.0.up", "z")
    two = {n: models.rounded(f"{n}.weight", weight, bits=8 if n == file else 4, group_size=32) for n in names}
    config = FORMATS.get("compressed-tensors").config(
        Export(two, (file,), {}, layout_of({"model_type": kind}).loaded(names))
    )
    groups = [group["targets"] for group in config["config_groups"].values()]
    also = [] if loaded is None else [loaded]
    # transformers reads every expert by the first group.
    assert groups == [["model.experts.0.up", "z"], [file, *also]]
    assert config["ignore"] == [file, *also]


def test_an_engines_extra_keys_in_list_entries_are_ignored(tmp_path):
    gate = checkpoint().dense["early_exit_gate.weight"]
    whole = checkpoint(layer(8, 32), dense={f"model.gates.{i}.weight": gate for i in range(2)})
    write_as(tmp_path / "ct", whole, "compressed-tensors")
    config = read_json(tmp_path / "ct" / "config.json")["quantization_config"]
    assert config["ignore"][-2:] == ["model.gates.1", r"re:model\.gates\.[0-9]+\..*"]


def test_bits_beyond_the_last_code_are_refused(tmp_path):
    quantized = layer(5, 13, 3, -1, False)
    top = lambda a: a.__setitem__((2, -1), a[2, -1] | -(1 << 31))  # noqa: E731
    last = lambda a: a.__setitem__((-1, 0), -1)  # noqa: E731
    write_as(tmp_path / "n", checkpoint(quantized), "native")
    for name, change, row in (("packed", top, 2), ("zero_point", last, 0)):
        said = rf"'a\.b\.weight_{name}': row {row} has bits after its last code"
        with pytest.raises(CheckpointError, match=said):
            read_any(broken(tmp_path / "d", CT, edit(f"a.b.weight_{name}", change), source=quantized))
        tensors = read_tensors(tmp_path / "n" / "model.safetensors")
        edit(f"a.b.weight_{name}", change)(tensors)
        with pytest.raises(CheckpointError, match=said):
            type(quantized).from_tensors(stored_settings(quantized), TensorReader("file", tensors), {})
    with pytest.raises(CheckpointError, match=r"'a\.b\.qweight'"):
        read_any(broken(tmp_path / "d", V2, edit("a.b.qweight", last), source=quantized))


def test_zero_points_in_bytes_of_older_files():
    quantized = layer(40, 64, 4, 32, False)
    tensors = quantized.tensors()
    tensors["a.b.weight_zero_point"] = RawTensor.of((quantized.zeros.astype(np.int16) - 8).astype(np.int8))
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    config = {"format": "pack-quantized", "config_groups": {"g": {"targets": ["re:a.*"], "weights": weights}}}
    read = FORMATS.get(CT).read_layer("a.b", TensorReader("f", tensors), config)
    assert read.same_as(quantized)
    tensors["a.b.weight_zero_point"] = RawTensor.of(np.full((40, 2), 9, np.int8))
    with pytest.raises(CheckpointError, match="zero points outside 4 bits"):
        FORMATS.get(CT).read_layer("a.b", TensorReader("f", tensors), config)
