"""Helpers for the tests of several formats."""

from __future__ import annotations

import json
import shutil

import numpy as np

from loopq.formats import FORMATS
from loopq.formats.convert import format_names, write_as
from loopq.formats.record import RECORD
from loopq.layers.layer import LayerSettings
from loopq.storage.files import RawTensor, read_json, read_tensors, write_tensors
from loopq.storage.schema import checked
from tests.support.checkpoints import checkpoint, layer

#: Formats of integers that loopq reads back. ModelOpt's holds NVFP4 alone.
FOLDERS = [name for name in format_names() if FORMATS.get(name).reads and name != "modelopt"]


def stored_settings(layer, **changes):
    return checked(LayerSettings, layer.settings() | changes, "file")


def as_words(tensor):
    return tensor.array().view(np.uint32)


RAGGED = layer(64, 80, 4, 32)


def broken(folder, form, change_tensors=None, change_config=None, source=None):
    """An export without its record, with tensors or config changed."""
    shutil.rmtree(folder, ignore_errors=True)
    write_as(folder, checkpoint(source or layer(64, 64, 4, 32, symmetric=form != "asym")), form)
    (folder / RECORD).unlink()
    path = folder / "model.safetensors"
    if change_tensors:
        tensors = read_tensors(path)
        change_tensors(tensors)
        write_tensors(path, tensors)
    if change_config:
        config = read_json(folder / "config.json")
        change_config(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, array, dtype=None):
    return lambda tensors: tensors.__setitem__(name, RawTensor.of(np.asarray(array), dtype))


def edit(name, change):
    def apply(tensors):
        array = tensors[name].array().copy()
        change(array)
        tensors[name] = RawTensor.of(array, tensors[name].dtype)

    return apply


CT, V1, V2 = "compressed-tensors", "gptq", "gptq_v2"
