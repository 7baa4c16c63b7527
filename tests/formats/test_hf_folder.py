"""Folders as Hugging Face lays them out: shards, side files, ties."""

from __future__ import annotations

import pytest

from loopq.errors import CheckpointError
from loopq.formats.convert import read_any, write_as
from loopq.formats.record import RECORD
from loopq.storage.files import read_json, read_tensors, write_json, write_tensors
from tests.support.formats import (
    CT,
    MA,
    V1,
    V2,
    broken,
)

from ..support.checkpoints import checkpoint, layer


def test_side_files_and_config_are_copied(tmp_path):
    whole = checkpoint(layer(8, 32))
    write_as(tmp_path / "ct", whole, "compressed-tensors")
    assert (tmp_path / "ct" / "modeling_made.py").read_bytes() == b"# code\n"
    config = read_json(tmp_path / "ct" / "config.json")
    assert config["name"] == "größe"
    assert list(config) == ["model_type", "hidden_size", "name", "quantization_config"]
    assert read_any(tmp_path / "ct").side_files == whole.side_files


def test_a_weight_tied_to_several_modules_is_stored_for_each(tmp_path):
    made = layer(8, 32, name="x.0.w.weight")
    whole = checkpoint(made, ties={"x.1.w.weight": "x.0.w.weight"})
    written = write_as(tmp_path / "ct", whole, "compressed-tensors")
    assert written.notes == {made.name: ("tied: stored again for x.1.w",)}
    assert written.n_bytes == 2 * written.n_bytes_before
    again = read_any(tmp_path / "ct")
    assert list(again.layers) == [made.name]
    assert again.ties == whole.ties


def test_shards_of_other_tools(tmp_path):
    made = layer(32, 32)
    folder = tmp_path / "g"
    write_as(folder, checkpoint(made), "gptq")
    (folder / RECORD).unlink()
    tensors = read_tensors(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, chosen in parts.items():
        write_tensors(folder / file, {n: tensors[n] for n in chosen})
    index = folder / "model.safetensors.index.json"
    weight_map = {n: f for f, chosen in parts.items() for n in chosen}
    write_json(index, {"weight_map": weight_map})
    assert read_any(folder).layers[made.name].same_as(made)
    write_json(index, {"weight_map": weight_map | {"more": "model-00001-of-00002.safetensors"}})
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'more': .*index\.json says model-00001-of-00002\.safetensors, it is in no shard",
    ):
        read_any(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing"):
        read_any(folder)
    index.unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a pickle"):
        read_any(folder)


def test_truncated_files_are_refused(tmp_path):
    for form in (CT, V1, V2, MA):
        folder = broken(tmp_path / "d", form, made=layer(256, 128, 4, 128))
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(
            CheckpointError, match=r"damaged, truncated or not a safetensors file \(.*incomplete metadata"
        ):
            read_any(folder)
