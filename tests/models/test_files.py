"""Names and layouts of files, as transformers renames, converts, fuses and pads them, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import loopq
from loopq.errors import CheckpointError
from loopq.models.files import find_names
from loopq.models.load import load_model
from loopq.storage.files import map_tensors
from loopq.storage.model_files import model_tensors, stored_state
from loopq.storage.names import Names, names_of
from loopq.systems.base import Batch
from tests.support.looped import change, fp8, save_dense
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


def _twice(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer 4 once more as a layer 5, which config.json does not have."""
    return {name: tensor, name.replace("layers.4.", "layers.5."): tensor.clone()}


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    folder = save_dense(tmp_path / "m")
    change(folder, _twice)
    source = f"looped:{folder}[1:3]x2"
    for memory in (None, 1000):
        report = load_model(source, memory=memory).report
        assert len(report.unexpected) == 9
        assert all(name.startswith("model.layers.5.") for name in report.unexpected)
    with pytest.warns(UserWarning, match=r"left out: model\.layers\.5\."):
        loopq.quantize(source, tokens(2), group_size=16, method="rtn")


def _bare(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: (weight * 100).to(torch.int8) if name.endswith("proj.weight") else weight}


@pytest.mark.parametrize(("tensors", "kind"), [(fp8, "F8_E4M3"), (_bare, "I8")])
@pytest.mark.parametrize("memory", [None, 1000])
def test_codes_without_a_method_are_refused(
    tmp_path: Path, tensors: Any, kind: str, memory: int | None
) -> None:
    folder = save_dense(tmp_path / "m")
    change(folder, tensors)
    with pytest.raises(CheckpointError, match=rf"_proj\.weight holds codes \({kind}\).*quantization_config"):
        load_model(f"looped:{folder}[1:3]x2", memory=memory)


def test_float8_without_scales_is_a_weight(tmp_path: Path) -> None:
    folder, name = save_dense(tmp_path / "m"), "model.layers.1.mlp.up_proj.weight"
    change(folder, lambda n, t: {n: t.to(torch.float8_e4m3fn) if n == name else t})
    expected = load_file(folder / "model.safetensors")[name].float()
    assert torch.equal(load_model(f"looped:{folder}[1:3]x2").model.get_parameter(name), expected)


def test_a_draft_head_is_kept_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    folder, head = save_dense(tmp_path / "m"), torch.randn(32, 64)
    change(folder, lambda n, t: {n: t, "mtp.fc.weight": head})
    source, q = f"looped:{folder}[1:3]x2", tmp_path / "q"
    loaded = load_model(source)
    assert loaded.report.unexpected == ()
    assert any("mtp.fc.weight" in note for note in loaded.report.notes)
    assert "mtp.fc.weight" in model_tensors(load_model(source, memory=1000).model)[0]
    loopq.quantize(source, tokens(2), out=q, group_size=16, method="rtn", levels="even")
    loopq.export(q, tmp_path / "ct", "compressed-tensors", remote_code=True, verify=False)
    again = loopq.quantize(q, tokens(2), out=tmp_path / "again", group_size=16, method="rtn", requantize=True)
    for place in (q, tmp_path / "ct", tmp_path / "again"):
        assert torch.equal(load_file(place / "model.safetensors")["mtp.fc.weight"], head)
    assert loopq.evaluate(source, {"again": again}, tokens(1))[1].kl.mean() < 1


@pytest.mark.parametrize("memory", [None, 1000])
def test_a_head_that_config_json_ties_is_refused(tmp_path: Path, memory: int | None) -> None:
    folder = save_dense(tmp_path / "m")
    change(folder, lambda n, t: {n: t}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head.* have different values.*tie_word_embeddings"):
        load_model(f"looped:{folder}[1:3]x2", memory=memory)
