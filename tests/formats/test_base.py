"""Duties of every format: reasons for refusing, and no half-written files."""

from __future__ import annotations

from dataclasses import fields

import pytest

from loopq.errors import CheckpointError, ConfigError
from loopq.formats import FORMATS
from loopq.formats.base import FormatOptions
from loopq.formats.convert import write_as
from loopq.layers.transforms import Rotation
from tests.support.formats import (
    FOLDERS,
)

from ..support.checkpoints import checkpoint, layer


def test_what_a_format_cannot_hold_is_refused_with_the_reason(tmp_path):
    asymmetric = checkpoint(layer(32, 32, symmetric=False))
    wide = checkpoint(layer(32, 32, scale_dtype="float32"))
    transposed = checkpoint(layer(32, 32, name="h.weight"))
    object.__setattr__(transposed.layers["h.weight"], "orientation", "in_out")
    for whole, form, match in [
        (asymmetric, "gptq", "use the format 'gptq_v2'"),
        (wide, "gptq", r"scale\[\d+, \d+\] = .*quantize again with scale_dtype='float16'"),
        (wide, "gptq_v2", "cannot hold"),
        (transposed, "compressed-tensors", "keeps it transposed"),
        (checkpoint(layer(32, 32, name="experts.w1")), "gptq", "take a module's 'weight' alone"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            write_as(tmp_path / "x", whole, form)
    with pytest.raises(ConfigError, match=r"unknown format 'gtpq' \(did you mean gptq\?\)"):
        write_as(tmp_path / "x", wide, "gtpq")
    with pytest.raises(ConfigError, match="no quantized layer"):
        write_as(tmp_path / "x", checkpoint(), "gptq")
    assert not (tmp_path / "x").exists()


def test_transformed_layers_stay_in_loopqs_own_format(tmp_path):
    quantized = layer(32, 32).with_transform(Rotation(32, "hadamard", 16))
    assert write_as(tmp_path / "n", checkpoint(quantized), "native").checked == 1
    for form in FOLDERS[1:]:
        with pytest.raises(CheckpointError, match=r"a\.b\.weight: its codes are for a transformed input"):
            write_as(tmp_path / form, checkpoint(quantized), form)


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path, monkeypatch):
    whole = checkpoint(layer(32, 32))
    write_as(tmp_path / "g", whole, "gptq")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write_as(tmp_path / "g", whole, "compressed-tensors")
    monkeypatch.setattr("loopq.storage.folders.free_bytes", lambda path: 10)
    with pytest.raises(CheckpointError, match="the disk has"):
        write_as(tmp_path / "x", whole, "gptq")
    monkeypatch.setattr("loopq.storage.folders.free_bytes", lambda path: 1 << 40)
    monkeypatch.setattr("loopq.storage.model_files.write_tensors", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_as(tmp_path / "x", whole, "gptq")
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_an_option_that_is_a_switch_takes_no_other_value():
    form = next(f for f in map(FORMATS.get, FORMATS.names()) if any(o.flag for o in f.options))
    option = next(o for o in form.options if o.flag)
    with pytest.raises(ConfigError, match="must be True or False"):
        form.taken({option.name: 3})


@pytest.mark.parametrize("name", FORMATS.names())
def test_every_option_has_a_value_and_no_value_of_a_format_is_without_option(name):
    form = FORMATS.get(name)
    values = {field.name for field in fields(form.values)}
    declared = {option.name for option in form.options}
    assert values - {field.name for field in fields(FormatOptions)} <= declared <= values
    assert form.taken({}) == form.values()


def test_a_format_that_is_only_written_says_so(tmp_path):
    for read, said in (
        (FORMATS.get("gguf").read, "loopq writes gguf and does not read it as a checkpoint"),
        (FORMATS.get("gguf").read_settings, "gguf does not hold the settings of the run"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read(tmp_path / "m.gguf")
