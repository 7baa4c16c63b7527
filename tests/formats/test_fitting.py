"""Layers that a format cannot hold as they are: ragged groups, scales of another type."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import CheckpointError, ConfigError
from loopq.formats.convert import read_any, write_as
from loopq.formats.fitting import restore
from loopq.formats.record import RECORD
from loopq.storage.files import read_json, read_tensors
from tests.support.formats import (
    RAGGED,
    stored_settings,
)

from ..support.checkpoints import checkpoint, layer


def test_ragged_groups_ask_for_a_policy(tmp_path):
    for form in ("compressed-tensors", "gptq", "gptq_v2"):
        with pytest.raises(
            CheckpointError, match=r"layer a\.b\.weight: the last .* has 16 of 32 .*; choose .*'split'"
        ):
            write_as(tmp_path / form, checkpoint(RAGGED), form)
        assert not (tmp_path / form).exists()
    with pytest.raises(CheckpointError, match="compressed-tensors cannot keep it: the library refuses"):
        write_as(tmp_path / "x", checkpoint(RAGGED), "compressed-tensors", ragged="keep")
    with pytest.raises(ConfigError, match="keep, split"):
        write_as(tmp_path / "x", checkpoint(RAGGED), "gptq", ragged="drop")


def test_ragged_split_repeats_scales_and_changes_no_number(tmp_path):
    written = write_as(tmp_path / "ct", checkpoint(RAGGED), "compressed-tensors", ragged="split")
    assert written.notes == {RAGGED.name: ("groups of 32 cut to 16: +256 bytes",)}
    stored = read_tensors(tmp_path / "ct" / "model.safetensors")["a.b.weight_scale"].float32()
    np.testing.assert_array_equal(stored, RAGGED.scales[:, [0, 0, 1, 1, 2]])
    (tmp_path / "ct" / RECORD).unlink()
    np.testing.assert_array_equal(
        read_any(tmp_path / "ct").layers[RAGGED.name].dequantize(), RAGGED.dequantize()
    )


def test_one_short_group_is_one_scale_per_row(tmp_path):
    quantized = layer(8, 20, 4, 32)
    written = write_as(tmp_path / "ct", checkpoint(quantized), "compressed-tensors")
    assert written.notes == {quantized.name: ("one group of 20 columns, stored as one scale per row",)}
    group = read_json(tmp_path / "ct" / "config.json")["quantization_config"]["config_groups"]["group_0"][
        "weights"
    ]
    assert (group["strategy"], group["group_size"]) == ("channel", None)
    assert read_any(tmp_path / "ct").layers[quantized.name].grid.group_size == 32


def test_bfloat16_scales_that_float16_holds_are_exported(tmp_path):
    quantized = layer(32, 32, scale_dtype="bfloat16")
    write_as(tmp_path / "g", checkpoint(quantized), "gptq")
    again = read_any(tmp_path / "g").layers[quantized.name]
    assert again.same_as(quantized)
    assert again.grid.scale_dtype == "bfloat16"
    quantized.scales[0, 0] = 2.0**-30
    with pytest.raises(CheckpointError, match=r"scale\[0, 0\]"):
        write_as(tmp_path / "x", checkpoint(quantized), "gptq")


def test_an_asymmetric_layer_is_not_restored_as_a_symmetric_one():
    quantized = layer(8, 32, 4, 32, False)
    with pytest.raises(CheckpointError, match="its tensors are not those of"):
        restore(quantized, stored_settings(quantized, symmetric=True, kind="integer"), "f")
