"""Folders of quantized layers: bytes and names, damage, records."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.convert import read_any, write_as
from loopq.formats.record import RECORD
from loopq.layers.layer import QuantizedLayer, TensorReader
from loopq.layers.transforms import ChannelScale, Rotation
from loopq.storage.files import float_to_raw, read_json, write_json
from tests.support.formats import (
    CT,
    V1,
    V2,
    broken,
    drop,
    edit,
    put,
    stored_settings,
)

from ..support.checkpoints import checkpoint, layer


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns", "group"), [(5, 50, 16), (33, 7, -1), (8, 64, 64)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_and_names_are_those_of_what_is_stored(bits, rows, columns, group, symmetric):
    plain = layer(rows, columns, bits, group, symmetric)
    scaled = plain.with_transform(ChannelScale(np.ones(columns, np.float32)))
    for quantized in (plain, scaled, plain.with_transform(Rotation(columns, "random", 4))):
        stored = quantized.tensors()
        assert quantized.n_bytes == sum(
            t.data.size for n, t in stored.items() if not n.endswith("weight_shape")
        )
        again = stored_settings(quantized)
        reader = TensorReader("file", stored)
        assert QuantizedLayer.from_tensors(again, reader, {}).same_as(quantized)
        assert reader.used == set(stored)


def test_layers_of_different_grids(tmp_path):
    quantized = [layer(64, 64, 4, 32, name="x.a.weight"), layer(64, 64, 8, 16, name="x.b.weight"),
            layer(64, 64, 4, 32, name="x.c.weight"), layer(64, 64, 3, -1, name="x.d.weight")]  # fmt: skip
    for form in ("compressed-tensors", "gptq", "gptq_v2"):
        write_as(tmp_path / form, checkpoint(*quantized), form)
        (tmp_path / form / RECORD).unlink()
        again = read_any(tmp_path / form)
        for one in quantized:
            assert again.layers[one.name].same_as(one), (form, one.name)
            assert again.layers[one.name].grid.group_size == one.grid.group_size
    groups = read_json(tmp_path / "compressed-tensors" / "config.json")["quantization_config"][
        "config_groups"
    ]
    assert [g["targets"] for g in groups.values()] == [["x.a", "x.c"], ["x.b"], ["x.d"]]


def test_quantize_config_alone_is_enough(tmp_path):
    quantized = layer(32, 32)
    write_as(tmp_path / "g", checkpoint(quantized), "gptq_v2")
    (tmp_path / "g" / RECORD).unlink()
    config = read_json(tmp_path / "g" / "config.json")
    old = config.pop("quantization_config")
    (tmp_path / "g" / "config.json").write_text(json.dumps(config))
    write_json(tmp_path / "g" / "quantize_config.json", {k: v for k, v in old.items() if k != "quant_method"})
    assert read_any(tmp_path / "g").layers[quantized.name].same_as(quantized)


DAMAGED_TENSORS = [
    (CT, drop("a.b.weight_scale"), r"tensor 'a\.b\.weight_scale' is missing"),
    (CT, drop("a.b.weight_shape"), r"tensor 'a\.b\.weight_shape' is missing"),
    (CT, put("a.b.weight_packed", np.zeros((64, 8), np.int64)), r"weight_packed' is I64 \[64, 8\]; expected I32"),
    (CT, put("a.b.weight_packed", np.zeros((64, 7), np.int32)), r"'a\.b\.weight_packed' is I32 \[64, 7\]"),
    (CT, put("a.b.weight_scale", np.ones((64, 3), np.float16)), r"'a\.b\.weight_scale' is F16 \[64, 3\]"),
    (CT, put("a.b.weight_scale", np.ones((64, 2), np.int8)), r"'a\.b\.weight_scale' is I8"),
    (CT, edit("a.b.weight_scale", lambda a: a.__setitem__((3, 1), 0)), r"'a\.b\.weight_scale' holds a scale"),
    (CT, edit("a.b.weight_shape", lambda a: a.__setitem__(1, 60)), r"'a\.b\.weight_(packed|scale)'"),
    (CT, put("a.b.weight_shape", np.array([0, 64])), r"'a\.b\.weight_shape': shape\[0\]: 0; allowed: 1 to"),
    (CT, put("a.b.weight_g_idx", np.zeros(64, np.int32)), r"'a\.b\.weight_g_idx'"),
    (V1, drop("a.b.qzeros"), r"tensor 'a\.b\.qzeros' is missing"),
    (V1, drop("a.b.scales"), r"tensor 'a\.b\.scales' is missing"),
    (V1, put("a.b.qweight", np.zeros((9, 64), np.int32)), r"'a\.b\.qweight' is I32 \[9, 64\]"),
    (V1, put("a.b.qzeros", np.zeros((2, 9), np.int32)), r"'a\.b\.qzeros' is I32 \[2, 9\]"),
    (V1, edit("a.b.qzeros", lambda a: a.__setitem__((1, 0), 0)), r"'a\.b\.qzeros': zero point 1 of output 0, group 1"),
    (V2, edit("a.b.qzeros", lambda a: a.__setitem__((0, 1), 0)), r"'a\.b\.qzeros': zero point 0 of output 8, group 0"),
    (V1, edit("a.b.g_idx", lambda a: a.__setitem__(5, 1)), r"'a\.b\.g_idx': column 5 is in group 1 instead of 0"),
    (V1, edit("a.b.scales", lambda a: a.__setitem__((0, 0), np.inf)), r"'a\.b\.scales' holds a scale"),
    (V1, put("a.b.qweight", np.zeros((8, 0), np.int32)), r"'a\.b\.qweight': no rows or no columns"),
    (V1, put("a.b.scales", np.ones((2, 64), np.float64)), r"'a\.b\.scales' is F64"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "change", "match"), DAMAGED_TENSORS)
def test_wrong_tensors_are_refused_by_name(tmp_path, form, change, match):
    with pytest.raises(CheckpointError, match=match):
        read_any(broken(tmp_path / "d", form, change))


@pytest.mark.parametrize(
    ("form", "change", "match"),
    [
        (
            V1,
            lambda c: c.update(checkpoint_format="gptq_p", format="gptq_p"),
            "'gptq', format 'gptq_p': loopq reads",
        ),
        (V1, lambda c: c.update(quant_method="quip"), "quant_method 'quip'"),
        (V1, lambda c: c.update(bits=5), r"module 'a\.b': bits: 5; allowed: 2, 3, 4, 8"),
        (V1, lambda c: c.update(bits=8), r"'a\.b\.qweight'"),
        (V1, lambda c: c.update(group_size="big"), "group_size: 'big'; allowed: a whole number"),
        (V1, lambda c: c.update(pack_dtype="int8"), "pack_dtype: 'int8'; allowed: 'int32'"),
        (CT, lambda c: c.update(config_groups={}), r"module 'a\.b': no config group says how"),
        (
            CT,
            lambda c: c["config_groups"]["group_0"].update(format="naive-quantized"),
            "format 'naive-quantized'; loopq reads pack-quantized",
        ),
        (
            CT,
            lambda c: c["config_groups"]["group_0"]["weights"].update(type="float"),
            "type: 'float'; allowed: 'int'",
        ),
        (
            CT,
            lambda c: c["config_groups"]["group_0"]["weights"].update(strategy="tensor"),
            "strategy: 'tensor'; allowed: 'group', 'channel'",
        ),
        (
            CT,
            lambda c: c["config_groups"]["group_0"]["weights"].update(strategy="channel"),
            "strategy 'channel' with group_size 32; loopq reads group with a size",
        ),
        (
            CT,
            lambda c: c["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
            "quantized activations",
        ),
        (CT, lambda c: c["config_groups"]["group_0"].update(targets=["re:.*other"]), "no config group"),
    ],
)
def test_wrong_configs_are_refused(tmp_path, form, change, match):
    with pytest.raises(CheckpointError, match=match):
        read_any(broken(tmp_path / "d", form, None, change))


TRELLIS = {"kind": "trellis"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 5}, r"bits must be one of \(2, 3, 4, 8\); got 5"),
        ({"bits": True}, "bits: True; allowed: a whole number"),
        ({"bits": 4.0}, r"bits: 4\.0; allowed: a whole number"),
        ({"scale_dtype": "int8"}, "scale_dtype must be one of float32, float16, bfloat16; got 'int8'"),
        ({"orientation": "up"}, "orientation: 'up'; allowed: 'out_in', 'in_out'"),
        ({"orientation": "conv0"}, "orientation: 'conv0'; allowed: 'out_in', 'in_out'"),
        ({"orientation": "conv3x3"}, "orientation conv3x3: a kernel has 9 numbers for each input channel"),
        ({"symmetric": None}, "symmetric: None; allowed: true or false"),
        ({"group_size": 0}, "group_size: 0; allowed: -1 or 1 to"),
        ({"group_size": "32"}, "group_size: '32'; allowed: a whole number"),
        ({"shape": [8]}, r"shape: \[8\]; allowed: a list of 2"),
        ({"shape": [8, -1]}, r"shape\[1\]: -1; allowed: 1 to"),
        ({"name": "../a.weight"}, r"name: '\.\./a\.weight'; allowed: a plain name"),
        (
            {**TRELLIS, "trellis": {"state_bits": 40, "stream_rows": 512}},
            r"trellis\.state_bits: 40; allowed: 4 to 16",
        ),
        (
            {**TRELLIS, "trellis": {"state_bits": 8, "stream_rows": 0}},
            r"trellis\.stream_rows: 0; allowed: 1 to",
        ),
        (
            {**TRELLIS, "trellis": {"state_bits": 8, "stream_rows": 9, "function": "x"}},
            r"trellis\.function: 'x'; allowed",
        ),
        ({"colour": "red"}, "'colour' is unknown; known: bits"),
        ({"kind": "colour"}, "unknown grid 'colour'; known: asymmetric"),
        ({"kind": "asymmetric"}, "symmetric is True; allowed: False"),
    ],
)
def test_an_index_entry_that_is_wrong_is_refused(change, match):
    with pytest.raises(CheckpointError, match=rf"^file: (layer a.b.weight: )?(grid \w+: )?{match}"):
        stored_settings(layer(8, 64), **change).make_grid("file")


def test_scales_in_other_types_are_read(tmp_path):
    quantized = layer(32, 32)
    wide = lambda t: t.__setitem__("a.b.scales", float_to_raw(t["a.b.scales"].float32(), "F32"))  # noqa: E731
    read = read_any(broken(tmp_path / "d", V1, wide, source=quantized)).layers["a.b.weight"]
    assert read.grid.scale_dtype == "float32"
    np.testing.assert_array_equal(read.scales, quantized.scales)


def test_a_folder_of_another_tool_has_no_settings_of_a_run(tmp_path):
    write_as(tmp_path / "g", checkpoint(layer(64, 64)), V1)
    (tmp_path / "g" / RECORD).unlink()
    with pytest.raises(CheckpointError, match="g: loopq did not make it, so the settings are not known"):
        FORMATS.get(V1).read_settings(tmp_path / "g")


def test_a_dense_tensor_with_a_name_of_the_format_is_refused(tmp_path):
    stored = checkpoint(layer(64, 64))
    stored.dense["a.b.scales"] = stored.dense["norm.weight"]
    with pytest.raises(
        CheckpointError, match=r"tensor 'a\.b\.scales' of the model has a name that gptq uses"
    ):
        write_as(tmp_path / "g", stored, V1)
