"""Names and layouts of files, as transformers renames, converts, fuses and pads them, both ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import loopq
from loopq.models.files import find_names
from loopq.models.load import load_model
from loopq.storage.files import map_tensors
from loopq.storage.model_files import model_tensors, stored_state
from loopq.storage.names import Names, names_of
from loopq.systems.base import Batch
from tests.support.systems import _hrm_text
from tests.support.vendors import dory, inkling, tokens


@pytest.mark.parametrize("kind", [dory, inkling])
def test_a_models_tensors_are_those_of_its_files(kind, tmp_path: Path) -> None:
    model = kind()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    find_names(model, stored)
    named = stored_state(model)
    assert set(named) == set(stored)
    assert all(torch.equal(named[name], tensor) for name, tensor in stored.items())
    names = names_of(model)
    back = names.taken(model, stored, lambda t: t, lambda t: t)
    state = model.state_dict()
    assert set(back) == set(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_layers_fused_in_files_have_the_models_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _hrm_text().eval()
    model.save_pretrained(tmp_path / "hrm")
    before = map_tensors(tmp_path / "hrm" / "model.safetensors")
    loaded = load_model(tmp_path / "hrm")
    shared = {p.name for p in loaded.system.shared_parameters(loaded.system.n_steps)}
    assert not shared <= set(before)
    assert shared <= set(model_tensors(loaded.model)[0])
    result = loopq.quantize(loaded, tokens(2), group_size=16, method="rtn", bits=8, out=tmp_path / "out")
    assert shared == set(result.layers)
    batch = Batch(torch.from_numpy(tokens(1)), (0,))
    logits = loopq.load(tmp_path / "out").system.rollout(batch, 2)
    expected = loaded.system.rollout(batch, 2)
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_a_model_of_another_class_has_its_own_names() -> None:
    model = torch.nn.Linear(2, 2)
    find_names(model, ["weight"])
    names = names_of(model)
    assert type(names) is Names
    assert names.in_file("weight") == names.in_model("weight") == names.of_layer("weight") == "weight"
    assert np.array_equal(model_tensors(model)[0]["bias"].float32(), model.bias.detach().numpy())
