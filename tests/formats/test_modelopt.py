"""ModelOpt's NVFP4: the numbers of compressed-tensors under other names, and files of ModelOpt itself."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from loopq.errors import CheckpointError
from loopq.formats.convert import read_any, write_as
from loopq.formats.float_codes import plain
from loopq.formats.record import RECORD
from loopq.formats.rules import check_engine
from loopq.layers.grids.fp4 import NVFP4
from loopq.layers.layer import QuantizedLayer
from loopq.storage.files import RawTensor, read_json, read_tensors, write_json, write_tensors
from tests.support.checkpoints import checkpoint, layer, reseal


def fp4(name="a.b.weight", exponent=-11, columns=64):
    """A layer with every level, and scales over the whole range."""
    rng = np.random.default_rng(3)
    grid = NVFP4(4, 16, "float8_e4m3fn", exponent)
    codes = rng.integers(-8, 7, (32, columns)).astype(np.int8)
    codes.flat[:15] = np.arange(-8, 7)
    scales = torch.from_numpy(np.exp2(rng.uniform(-5, 8, (32, -(-columns // 16))))).to(torch.float8_e4m3fn)
    return QuantizedLayer(name, grid, codes, scales.float().numpy() * np.float32(2.0**exponent), None)


def test_the_layout_is_the_published_one(tmp_path):
    whole = checkpoint(fp4())
    write_as(tmp_path / "m", whole, "modelopt")
    tensors = read_tensors(tmp_path / "m" / "model.safetensors")
    layout = {n.removeprefix("a.b."): (t.dtype, t.shape) for n, t in tensors.items() if n.startswith("a.b.")}
    assert layout == {
        "weight": ("U8", (32, 32)),
        "weight_scale": ("F8_E4M3", (32, 4)),
        "weight_scale_2": ("F32", ()),
    }
    quantization = read_json(tmp_path / "m" / "hf_quant_config.json")["quantization"]
    ignore = ["early_exit_gate", "embed"]
    assert quantization == {
        "quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ignore,
    }  # fmt: skip
    config = read_json(tmp_path / "m" / "config.json")["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == (
        "modelopt",
        "W4A16_NVFP4",
        ignore,
    )


@pytest.mark.parametrize("exponent", [-11, -30, 3])
def test_weights_are_those_of_compressed_tensors(tmp_path, exponent):
    quantized = fp4(exponent=exponent)
    by_form = {}
    for form in ("modelopt", "compressed-tensors"):
        write_as(tmp_path / form, checkpoint(quantized), form)
        assert read_any(tmp_path / form).layers[quantized.name].same_as(quantized)
        by_form[form] = plain(read_tensors(tmp_path / form / "model.safetensors"), "here")[
            "a.b.weight"
        ].array()
    np.testing.assert_array_equal(by_form["modelopt"], by_form["compressed-tensors"])
    np.testing.assert_array_equal(by_form["modelopt"], quantized.dequantize())


@pytest.mark.parametrize("told_in", ["config.json", "hf_quant_config.json"])
def test_a_file_without_a_record_is_a_source_of_weights(tmp_path, told_in):
    quantized = fp4()
    write_as(tmp_path / "m", checkpoint(quantized), "modelopt")
    (tmp_path / "m" / RECORD).unlink()
    if told_in != "config.json":
        config = read_json(tmp_path / "m" / "config.json")
        write_json(tmp_path / "m" / "config.json", {"model_type": config["model_type"]})
    again = read_any(tmp_path / "m")
    assert not again.layers
    np.testing.assert_array_equal(again.dense["a.b.weight"].array(), quantized.dequantize())


def test_what_it_cannot_hold_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="INT4"):
        write_as(tmp_path / "a", checkpoint(layer(32, 64)), "modelopt")
    with pytest.raises(CheckpointError, match="50 inputs are no whole groups"):
        write_as(tmp_path / "b", checkpoint(fp4(columns=50)), "modelopt")
    pair = {n: fp4(f"m.{n}.weight", e) for n, e in (("gate_proj", -11), ("up_proj", -12))}
    with pytest.raises(CheckpointError, match="unlike"):
        check_engine("vllm", "modelopt", {x.name: x for x in pair.values()}, None)


def test_a_name_that_vllm_finds_in_another_is_told(tmp_path):
    dense = {"a.weight": RawTensor.of(np.ones((2, 16), np.float32))}
    written = write_as(tmp_path / "m", checkpoint(fp4(), dense=dense), "modelopt")
    assert any("a.b" in remark for remark in written.remarks)


@pytest.mark.parametrize("factor", [3.0, 0.0, np.nan])
def test_a_damaged_factor_is_refused(tmp_path, factor):
    write_as(tmp_path / "m", checkpoint(fp4()), "modelopt")
    reseal(tmp_path / "m" / RECORD, lambda data: data.pop("files"))
    file = tmp_path / "m" / "model.safetensors"
    write_tensors(
        file, read_tensors(file) | {"a.b.weight_scale_2": RawTensor.of(np.array(factor, np.float32))}
    )
    with pytest.raises(CheckpointError, match=r"weight_scale_2|weight_global_scale"):
        read_any(tmp_path / "m")


def test_a_weight_of_modelopt_itself_is_equal_to_the_last_bit():
    """Made by `NVFP4QTensor.quantize` of ModelOpt 0.47; the digest is that of ModelOpt's `dequantize` in
    float32."""
    codes = (
        "dda944fae2225195fe44e47ac41966d50b1b1223490a73ee3a1499923a75cda5"
        "4b557d2abeaa5c49380ca425798ecd40d622ef190122c2c4f988248caba65154"
    )
    stored = {
        "a.weight": RawTensor.of(np.frombuffer(bytes.fromhex(codes), np.uint8).reshape(4, 16)),
        "a.weight_scale": RawTensor.of(
            np.frombuffer(bytes.fromhex("4241686c7e7d5756"), np.uint8).reshape(4, 2), "F8_E4M3"
        ),
        "a.weight_scale_2": RawTensor.of(np.frombuffer(bytes.fromhex("55c63b3b"), np.float32)[0]),
    }
    weight = plain(stored, "here")["a.weight"].array()
    digest = "3d2f6540bcd995f6edcfbe534b2de39dab7ad4e291dcd0d8a903f05d2307998d"
    # Its table has no negative zero.
    assert hashlib.sha256((weight + 0).tobytes()).hexdigest() == digest
