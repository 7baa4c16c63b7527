"""GPTQ's files: tensors by definition, both versions, one group size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats import FORMATS, gptq
from loopq.formats.convert import read_any, write_as
from loopq.formats.record import RECORD, Export
from loopq.storage.files import RawTensor, read_json, read_tensors, write_json, write_tensors
from tests.support.formats import (
    RAGGED,
    as_words,
)

from ..support.checkpoints import checkpoint, layer


def bitstream(codes, bits):
    """Words of one run of codes, by the definition: code j in bits j*b to (j+1)*b of one long number."""
    number = sum(int(c) << (bits * j) for j, c in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [(number >> (32 * i)) & 0xFFFFFFFF for i in range(count)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_tensors_by_definition(bits, symmetric):
    quantized = layer(40, 45, bits, 16, symmetric)
    form = FORMATS.get("gptq_v2")
    tensors = form.tensors("m", form.prepare(quantized, "keep").layer)
    middle = 1 << (bits - 1)
    u = quantized.codes.astype(int) + (middle if symmetric else 0)
    z = np.full(quantized.scales.shape, middle) if symmetric else quantized.zeros.astype(int)
    for column in (0, 7, 39):
        assert as_words(tensors["m.qweight"])[:, column].tolist() == bitstream(u[column], bits)
    for group in range(3):
        assert as_words(tensors["m.qzeros"])[group].tolist() == bitstream(z[:, group], bits)
        np.testing.assert_array_equal(tensors["m.scales"].array()[group], quantized.scales[:, group])
    assert tensors["m.g_idx"].array().tolist() == [j // 16 for j in range(45)]
    assert [t.dtype for t in tensors.values()] == ["I32", "I32", "F16", "I32"]


def test_gptq_version_1_stores_zero_minus_one_field_by_field():
    for bits in (2, 3, 4, 8):
        quantized = layer(32, 32, bits, 32)
        first = FORMATS.get("gptq").tensors("m", quantized)["m.qzeros"]
        assert as_words(first)[0].tolist() == bitstream([(1 << (bits - 1)) - 1] * 32, bits)
    assert set(as_words(FORMATS.get("gptq").tensors("m", layer(32, 32))["m.qzeros"]).flat) == {0x77777777}
    assert set(as_words(FORMATS.get("gptq_v2").tensors("m", layer(32, 32))["m.qzeros"]).flat) == {0x88888888}


def test_gptq_gives_all_layers_one_group_size(tmp_path):
    quantized = [layer(32, 64, 4, 32, name="a.weight"), RAGGED, layer(32, 72, 4, 32, name="c.weight"),
            layer(32, 64, 4, 16, name="d.weight")]  # fmt: skip
    written = write_as(tmp_path / "g", checkpoint(*quantized), "gptq", ragged="split")
    assert written.notes == {
        "a.weight": ("groups of 32 cut to 8: +384 bytes",),
        RAGGED.name: ("groups of 32 cut to 16: +256 bytes", "groups of 16 cut to 8: +640 bytes"),
        "c.weight": ("groups of 32 cut to 8: +384 bytes",),
    }
    (tmp_path / "g" / RECORD).unlink()
    again = read_any(tmp_path / "g").layers
    assert [again[one.name].grid.group_size for one in quantized] == [8, 8, 8, 16]
    for one in quantized:
        np.testing.assert_array_equal(again[one.name].dequantize(), one.dequantize())


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"}, "gptq"),
        ({"quant_method": "awq"}, "gptq_v2"),
        ({"quant_method": "other"}, None),
    ],
)
def test_a_config_tells_the_version(config, name):
    assert [v for v in ("gptq", "gptq_v2") if FORMATS.get(v).describes(config)] == [n for n in (name,) if n]


def test_most_layers_set_the_rule_and_the_others_are_named():
    layers = {
        "m.0.a": layer(32, 32), "m.0.b": layer(32, 32), "m.1.c": layer(32, 32, 8, 16, symmetric=False)
    }  # fmt: skip
    export = Export(layers, ("m.1.d",), {"made": "here"})
    config = FORMATS.get("gptq_v2").config(export)
    assert config["dynamic"] == {
        r"-:^m\.1\.d$": {}, r"+:^m\.1\.c$": {"bits": 8, "group_size": 16, "sym": False}
    }  # fmt: skip
    assert (config["bits"], config["group_size"], config["sym"]) == (4, 32, True)
    assert (config["desc_act"], config["lm_head"], config["pack_dtype"]) == (False, False, "int32")
    assert config["checkpoint_format"] == config["format"] == "gptq_v2"
    assert config["modules_in_block_to_quantize"] == [["m.0.a", "m.0.b", "m.1.c"]]
    assert (config["block_name_to_quantize"], config["meta"]) == ("m", {"made": "here"})
    alone = Export({"lm_head": layer(32, 32)}, ())
    assert FORMATS.get("gptq").config(alone)["lm_head"] is True


@pytest.mark.parametrize(
    ("modules", "path"),
    [(["a.b.c", "a.b.d"], "a.b"), (["a.b.c", "a.d.c"], "a"), (["a.b", "c.b"], ""), (["a"], ""), ([], "")],
)
def test_the_common_path_is_the_longest(modules, path):
    assert gptq._common_path(modules) == path


def test_layers_outside_blocks_have_a_remark():
    def remarks(*names):
        return FORMATS.get("gptq").remarks(SimpleNamespace(layers=dict.fromkeys(names)))

    assert remarks("m.0.a", "0.b") == ()
    (remark,) = remarks("m.0.a", "p", "q", "m.r", "m.0")
    assert "(p, q, m.r)" in remark


def test_an_asymmetric_grid_needs_version_2():
    quantized = layer(32, 32, symmetric=False)
    with pytest.raises(CheckpointError, match=r"layer a\.b\.weight: an asymmetric grid in GPTQ version 1"):
        FORMATS.get("gptq").prepare(quantized, "keep")
    assert FORMATS.get("gptq_v2").prepare(quantized, "keep").layer.zeros is not None


def rewritten(folder, **changes):
    """Replace tensors of a folder of another tool; None leaves one out."""
    (folder / RECORD).unlink(missing_ok=True)
    tensors = dict(read_tensors(folder / "model.safetensors"))
    tensors |= {f"a.b.{name}": value for name, value in changes.items()}
    write_tensors(folder / "model.safetensors", {n: t for n, t in tensors.items() if t is not None})


def test_groups_in_another_order_are_refused(tmp_path):
    write_as(tmp_path / "g", checkpoint(layer(32, 64)), "gptq")
    index = np.arange(64, dtype=np.int32) // 32
    index[[31, 32]] = index[[32, 31]]
    rewritten(tmp_path / "g", g_idx=RawTensor.of(index))
    with pytest.raises(CheckpointError, match="column 31 is in group 1 instead of 0"):
        read_any(tmp_path / "g")
    rewritten(tmp_path / "g", g_idx=None)
    assert read_any(tmp_path / "g").layers["a.b.weight"].same_as(layer(32, 64))


def test_files_of_awq_are_read_by_their_definition(tmp_path):
    """AWQ: words of eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble."""
    quantized = layer(16, 64, symmetric=False, name="a.b.weight")

    def words(codes):
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        nested = codes.reshape(len(codes), -1, 8).astype(np.uint32)
        return sum(nested[..., output] << np.uint32(4 * place) for place, output in enumerate(order)).view(
            np.int32
        )

    write_as(tmp_path / "g", checkpoint(quantized), "gptq_v2")
    qweight, qzeros = RawTensor.of(words(quantized.codes.T)), RawTensor.of(words(quantized.zeros.T))
    rewritten(tmp_path / "g", qweight=qweight, qzeros=qzeros, g_idx=None)
    config = read_json(tmp_path / "g" / "config.json")
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"
    }  # fmt: skip
    write_json(tmp_path / "g" / "config.json", config)
    (tmp_path / "g" / "quantize_config.json").unlink()
    reread = read_any(tmp_path / "g").layers["a.b.weight"]
    np.testing.assert_array_equal(reread.codes, quantized.codes)
    np.testing.assert_array_equal(reread.zeros, quantized.zeros)
    np.testing.assert_array_equal(reread.dequantize(), quantized.dequantize())
    assert not reread.grid.symmetric
    with pytest.raises(CheckpointError, match=r"F32 \[2, 2\] is no AWQ"):
        gptq._awq_codes(RawTensor.of(np.zeros((2, 2), np.float32)), Path("f"), "m")
