"""Tensors and files of a model: bytes, ties, what was altered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import CheckpointError
from loopq.storage.model_files import check_files, model_tensors, raw, to_torch, write_files


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_a_tensor_comes_back_in_its_type(dtype):
    tensor = torch.arange(6).reshape(3, 2).T.to(dtype)
    for copy in (True, False):
        assert torch.equal(to_torch(raw(tensor, copy)), tensor)
    assert to_torch(raw(torch.zeros(0, 3, dtype=dtype))).shape == (0, 3)


def test_without_a_copy_the_bytes_are_the_tensors_own():
    tensor = torch.zeros(3)
    copied, mapped = raw(tensor), raw(tensor, copy=False)
    tensor[1] = 2.0
    assert mapped.array().tolist() == [0.0, 2.0, 0.0]
    assert copied.array().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="read-only"):
        mapped.data[0] = 1


def test_a_type_that_files_do_not_hold_is_refused():
    with pytest.raises(CheckpointError, match="complex128 cannot be stored"):
        raw(torch.zeros(2, dtype=torch.complex128))


def test_a_tied_weight_is_read_once():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 3, bias=False), "b": torch.nn.Linear(2, 3, bias=False)}
    )
    model["b"].weight = model["a"].weight
    tensors, ties = model_tensors(model)
    assert list(tensors) == ["a.weight"]
    assert ties == {"b.weight": "a.weight"}


def test_files_have_digests_and_an_altered_one_is_named(tmp_path):
    tensors = {"x": raw(torch.from_numpy(np.arange(4.0)))}
    entries = write_files(tmp_path, tensors, {"config.json": b"{}"})
    assert [entry.file for entry in entries] == ["config.json", "model.safetensors"]
    check_files(tmp_path, entries)
    (tmp_path / "config.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match=r"config\.json: altered"):
        check_files(tmp_path, entries)
    (tmp_path / "config.json").write_bytes(b"{} ")
    with pytest.raises(CheckpointError, match=r"config\.json: .* 3 bytes instead of 2"):
        check_files(tmp_path, entries)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_files(tmp_path, entries)


@pytest.mark.parametrize("name", ["../x", "a/b", "model.safetensors"])
def test_names_that_lead_outside_are_refused_before_writing(tmp_path, name):
    with pytest.raises(CheckpointError):
        write_files(tmp_path, {}, {name: b""})
    assert list(tmp_path.iterdir()) == []
