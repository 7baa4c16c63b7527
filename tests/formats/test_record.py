"""Records of exports: damage, flipped bits, and the way back to the checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats.convert import inspect_any, read_any, verify, write_as
from loopq.formats.record import RECORD
from loopq.run.export import exported
from loopq.run.gate import Gate
from loopq.storage.files import float_to_raw, read_json
from tests.support.formats import (
    V1,
)

from ..support.checkpoints import checkpoint, layer, reseal


def test_records_that_do_not_fit_are_refused(tmp_path):
    def record(change):
        folder = tmp_path / "d"
        shutil.rmtree(folder, ignore_errors=True)
        write_as(folder, checkpoint(layer(64, 64, 4, 32)), V1)
        reseal(folder / RECORD, change)
        return folder

    fit = r"layer a\.b\.weight: its tensors are not those of"
    for change, match in [
        (lambda d: d.update(version=3), "version 3; this loopq reads version 2"),
        (lambda d: d.update(format="x"), "its format is not 'loopq-export'"),
        (lambda d: d.update(target="gptq_v2"), "config.json says gptq, .* 'gptq_v2'"),
        (lambda d: d["layers"][0].update(name="other.weight"), "layer 'other.weight' is in loopq_export"),
        (lambda d: d["layers"].clear(), "layer 'a.b.weight' is not in"),
        (lambda d: d.pop("ties"), "'ties' is missing; known: loopq_version"),
        (lambda d: d["layers"][0].pop("bits"), r"layers\[0\]: 'bits' is missing"),
        (lambda d: d["layers"][0].update(bits=8), fit),
        (lambda d: d["layers"][0].update(shape=[64, 60]), fit),
        (lambda d: d["layers"][0].update(shape=[32, 64]), fit),
        (lambda d: d["layers"][0].update(group_size=64), "was changed after the export"),
        (lambda d: d["layers"][0].update(group_size=16), "was changed after the export"),
        (lambda d: d["layers"][0].update(symmetric=False), fit),
        (lambda d: d["layers"][0].update(transform={"type": "channel_scale"}), fit),
        (lambda d: d["layers"][0].update(trellis={"state_bits": 8, "stream_rows": 512}), fit),
    ]:
        with pytest.raises(CheckpointError, match=match):
            read_any(record(change))
    folder = record(lambda d: None)
    with pytest.raises(CheckpointError, match=r"layer a\.b\.weight: reads back differently"):
        verify(folder, checkpoint(layer(64, 64, 4, 32, seed=1)))


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "report.jsonl", RECORD])
def test_one_flipped_bit_of_an_export_is_refused(tmp_path, form, name):
    quantized = layer(64, 128, 4, 128, name="x.a.weight")
    write_as(tmp_path / form, checkpoint(quantized), form)
    file = tmp_path / form / name
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    for use in (read_any, inspect_any):
        with pytest.raises(CheckpointError, match=name):
            use(tmp_path / form)


def test_an_export_before_checksums_still_opens(tmp_path):
    quantized = layer(64, 64, 4, 32, name="x.a.weight")
    write_as(tmp_path / "q", checkpoint(quantized), "compressed-tensors")
    record = tmp_path / "q" / RECORD
    reseal(record, lambda data: [data.pop(key) for key in ("files", "native_sha256")])
    assert read_any(tmp_path / "q").layers["x.a.weight"].same_as(quantized)


def test_an_export_gives_back_the_exported_checkpoint(tmp_path):
    quantized = layer(64, 64, 4, 32, name="x.a.weight")
    write_as(tmp_path / "q", checkpoint(quantized), "compressed-tensors")
    record = tmp_path / "q" / RECORD
    assert read_json(record)["native_sha256"] == checkpoint(quantized).digest()
    reseal(record, lambda data: data.update(native_sha256="0" * 64))
    with pytest.raises(CheckpointError, match="does not give back"):
        read_any(tmp_path / "q")


@pytest.mark.parametrize("given", [{}, {"dtype": None}, {"dtype": "float16"}, {"torch_dtype": "float16"}])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_config_without_a_type_gets_the_models(tmp_path, given, kind):
    """Else transformers' "auto" takes float16, the type of the scales."""
    weight = float_to_raw(np.ones((40, 8), np.float32), {"float32": "F32", "bfloat16": "BF16"}[kind])
    source = checkpoint(layer(32, 32), dense={"embed.weight": weight, "early_exit_gate.weight": weight})
    config = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **given}).encode()
    source = dataclasses.replace(source, side_files={"config.json": config})
    exported(source, tmp_path / "g", V1, Gate(force=True))
    written = read_json(tmp_path / "g" / "config.json")
    assert (written.get("dtype") or written["torch_dtype"]) == ("float16" if any(given.values()) else kind)
    assert read_any(tmp_path / "g").side_files["config.json"] == config
