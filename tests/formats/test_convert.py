"""From one format to another and back; which format a folder holds."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq.errors import CheckpointError, ConfigError
from loopq.formats import convert
from loopq.formats.convert import format_names, format_of, inspect_any, read_any, write_as
from loopq.formats.record import RECORD
from tests.support.formats import (
    FOLDERS,
)

from ..support.checkpoints import checkpoint, dequantized, layer


def digest(folder):
    """Contents of every file of a folder."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_names():
    assert format_names()[0] == "native"
    assert FOLDERS == ["native", "compressed-tensors", "gptq", "gptq_v2"]
    assert {"gguf", "imatrix"} <= set(format_names())
    with pytest.raises(ConfigError, match=r"unknown format 'gptq2'.*did you mean"):
        write_as("out", checkpoint(layer(32, 32)), "gptq2")
    with pytest.raises(ConfigError, match="format native does not read ragged; its options: none"):
        write_as("out", checkpoint(layer(32, 32)), "native", ragged="split")
    with pytest.raises(ConfigError, match="ragged must be one of keep, split; got 'cut'"):
        write_as("out", checkpoint(layer(32, 32)), "gptq", ragged="cut")
    with pytest.raises(ConfigError, match="imatrix is written from a calibration dump"):
        write_as("out", checkpoint(layer(32, 32)), "imatrix")


def fitting(draw):
    """A layer that a format can hold, the format and the policy it needs."""
    form = draw(st.sampled_from(["native", "compressed-tensors", "gptq", "gptq_v2"]))
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    symmetric = draw(st.booleans()) if form in ("native", "compressed-tensors", "gptq_v2") else True
    group = draw(st.sampled_from([-1, 1, 4, 7, 16, 32, 128]))
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    kinds = (
        ["float16", "bfloat16", "float32"]
        if form in ("native", "compressed-tensors")
        else ["float16", "bfloat16"]
    )
    kind = draw(st.sampled_from(kinds))
    policy = draw(st.sampled_from(["keep", "split"])) if form.startswith("gptq") else "split"
    quantized = layer(rows, columns, bits, group, symmetric, scale_dtype=kind, seed=draw(st.integers(0, 99)))
    return quantized, form, None if form == "native" else policy


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.composite(fitting)())
def test_there_and_back_gives_the_same_bytes(tmp_path_factory, case):
    quantized, form, policy = case
    base = tmp_path_factory.mktemp("there")
    whole = checkpoint(quantized)
    write_as(base / "native", whole, "native")
    written = write_as(base / "out", read_any(base / "native"), form, ragged=policy)
    assert written.checked == 1
    write_as(base / "back", read_any(base / "out"), "native")
    assert digest(base / "back") == digest(base / "native")
    write_as(base / "again", read_any(base / "back"), form, ragged=policy)
    assert digest(base / "again") == digest(base / "out")
    np.testing.assert_array_equal(
        read_any(base / "out").layers[quantized.name].dequantize(), dequantized(quantized).astype("f4")
    )
    # The weight that a reader without knowledge of loopq decodes.
    shutil.copytree(base / "out", base / "bare")
    if form != "native":
        (base / "bare" / RECORD).unlink()
        bare = read_any(base / "bare").layers[quantized.name].dequantize()
        np.testing.assert_array_equal(bare, quantized.dequantize())
    shutil.rmtree(base)


def test_inspect_explains_each_format(tmp_path):
    whole = checkpoint(layer(64, 128, 4, 128))
    for form in FOLDERS:
        write_as(tmp_path / form, whole, form)
        assert format_of(tmp_path / form).name == form
        facts = inspect_any(tmp_path / form)
        assert facts["format"] == form
        assert facts["layers"][0]["bits_per_weight"] == 4.125
        assert {d["name"] for d in facts["dense"]} == set(whole.dense)
        assert facts["settings"]["seed"] == 3
        json.dumps(facts)
        if form != "native":
            on_disk = (tmp_path / form / "model.safetensors").stat().st_size
            assert facts["n_bytes_files"] == on_disk
            assert facts["exported_by_loopq"]
            (tmp_path / form / RECORD).unlink()
            assert inspect_any(tmp_path / form)["exported_by_loopq"] is None


def test_folders_that_are_no_checkpoint_say_why(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"no checkpoint: neither loopq\.json nor config\.json is there"
    ):
        convert.format_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not convert.is_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"a model that is not quantized"):
        read_any(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: the whole: \[\]; allowed: an object"):
        read_any(tmp_path)
    entries = {"quant_method": "odd", "format": "older", "checkpoint_format": "newer"}
    for name in ("newer", "older", None):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": entries}))
        with pytest.raises(
            CheckpointError, match=rf"quant_method 'odd', format '?{name}'?: loopq reads compressed"
        ) as stop:
            convert.format_of(tmp_path)
        assert "native" not in str(stop.value)
        entries.pop({"newer": "checkpoint_format", "older": "format"}.get(name, ""), None)
    assert convert.is_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "loopq.json").write_text("{}")
    assert convert.is_checkpoint(tmp_path)
    (tmp_path / "loopq.json").unlink()
    assert not convert.is_checkpoint(tmp_path)


def test_a_model_is_read_as_a_checkpoint_without_layers(saved_model, tmp_path):
    read = convert.read_model(saved_model)
    assert (read.layers, read.ties, read.settings) == ({}, {}, {"system": None})
    assert set(read.dense) == set(convert.hf_folder.read_all_tensors(saved_model))
    assert json.loads(read.side_files["config.json"]) == json.loads((saved_model / "config.json").read_text())
    looped = convert.read_model(f"looped:{saved_model}[0:1]x3")
    config = json.loads(looped.side_files["config.json"])
    assert config["looped_layers"] == [0, 1, 3]
    write_as(tmp_path / "q", checkpoint(layer(8, 32)), "native")
    assert list(convert.read_model(tmp_path / "q").layers) == ["a.b.weight"]
    with pytest.raises(CheckpointError, match="neither"):
        convert.read_model(tmp_path)


def test_settings_and_content_are_read_by_the_format(tmp_path):
    whole = checkpoint(layer(8, 32))
    write_as(tmp_path / "q", whole, "native")
    assert convert.settings_of(tmp_path / "q")["seed"] == 3
    convert.check_readable(tmp_path / "q")
    assert list(convert.verify(tmp_path / "q", whole).layers) == ["a.b.weight"]
    with pytest.raises(CheckpointError):
        convert.verify(tmp_path / "q", checkpoint(layer(8, 32, seed=1)))
