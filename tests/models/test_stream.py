"""A model that is read layer by layer gives the bytes of one in memory, and never holds more than a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loopq
from loopq.errors import CheckpointError, ConfigError, NonFiniteError
from loopq.layers.grid import BITS
from loopq.models.load import load_model
from loopq.models.stream import Stream, layers_of
from loopq.run.budget import Fit
from loopq.storage.model_files import is_streamed, raw
from loopq.systems.base import Batch
from tests.support.accelerator import DEVICE, accelerator
from tests.support.kills import Kill, Killer
from tests.support.marks import slow_unless
from tests.support.vendors import dory, inkling, tokens


def _held(model: nn.Module) -> int:
    """Bytes of all parameters that have memory of their own."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def _is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


@pytest.mark.parametrize("metric", slow_unless(lambda metric: metric == "inputs", ["inputs", "loop"]))
@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind is dory, [dory, inkling]))
def test_bytes_are_those_of_a_run_in_memory(kind: Any, metric: str, tmp_path: Path) -> None:
    kind().save_pretrained(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    streamed = load_model(tmp_path / "model", memory=size // 2)
    assert is_streamed(streamed.model)
    most = []
    for layer in streamed.model.model.layers:
        next(layer.children()).register_forward_hook(lambda *_: most.append(_held(streamed.model)))
    settings = {"group_size": 16, "metric": metric, "descent": 2, "memory": 1 << 22, "batch_size": 3}
    with pytest.raises(Kill):
        loopq.quantize(streamed, tokens(), out=tmp_path / "streamed", progress=Killer(9), **settings)
    result = loopq.quantize(streamed, tokens(), out=tmp_path / "streamed", **settings)
    assert all(_is_mapped(layer.codes) for layer in result.layers.values())
    assert max(most) < 0.6 * size
    loopq.quantize(tmp_path / "model", tokens(), out=tmp_path / "whole", **settings)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "streamed").iterdir())
    for name in files:
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_other_weights_are_visited_too(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    streamed, whole = load_model(tmp_path, memory=1), load_model(tmp_path)
    settings = {"group_size": 16, "inputs": "asymmetric", "n_steps": 2, "descent": 2, "metric": "inputs"}
    expected = loopq.quantize(whole, tokens(2), **settings)
    result = loopq.quantize(streamed, tokens(2), **settings)
    assert all(layer.same_as(result.layers[name]) for name, layer in expected.layers.items())
    before, after = (loopq.evaluate(x, {"INT4": expected}, tokens(2)) for x in (whole, streamed))
    assert after[1].kl.mean() > 0
    assert np.array_equal(after[1].kl, before[1].kl)
    assert float(streamed.system.rollout(Batch(torch.from_numpy(tokens(1)), (0,)), 3).sum()) == float(
        whole.system.rollout(Batch(torch.from_numpy(tokens(1)), (0,)), 3).sum()
    )


@pytest.mark.slow
def test_a_budget_is_met_in_parts_by_the_same_codes(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    asked = Fit(12.0, bits=(2, 4), group_sizes=(16,))
    settings = {"method": "gptq", "levels": "even", "group_size": 16}
    expected = loopq.quantize(load_model(tmp_path), tokens(2), fit=asked, **settings)
    streamed = load_model(tmp_path, memory=1)
    # All layers together take about a megabyte.
    result = loopq.quantize(streamed, tokens(2), fit=asked, memory=1 << 19, **settings)
    assert result.settings["allocation"] == expected.settings["allocation"]
    assert all(layer.same_as(result.layers[name]) for name, layer in expected.layers.items())
    many = Fit(12.0, bits=BITS, group_sizes=(8, 16))
    with pytest.raises(ConfigError, match="fit: the candidates of layer"):
        loopq.quantize(streamed, tokens(2), fit=many, memory=1 << 17, **settings)


def test_layers_of_every_list_are_read_and_shared_weights_stay(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.ModuleList(Block() for _ in range(2))
            self.after = nn.ModuleDict({"core": nn.ModuleList([nn.ModuleList(Block() for _ in range(2))])})
            self.alone = nn.ModuleList([nn.Linear(8, 8)])
            self.before[1].inner.weight = self.alone[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.before, *self.after["core"][0], *self.before):
                x = block(x)
            return x @ self.alone[0].weight

    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 8)
    assert list(layers_of(model)) == ["before.0.", "before.1.", "after.core.0.0.", "after.core.0.1."]
    with torch.no_grad():
        expected = model(x)
        Stream(model, {name: raw(tensor) for name, tensor in model.state_dict().items()}, renamed=False)
        assert torch.equal(model(x), expected)
    assert _held(model) < 6 * 8 * 9 * 4
    assert sum(bool(p.isnan().any()) for p in model.parameters()) >= 4


def test_nan_in_a_file_is_named_before_anything_runs(tmp_path: Path) -> None:
    model = dory()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[1, 3] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(
        NonFiniteError, match=r"layers\.2\..*down_proj\.weight holds NaN or infinity, at \[1, 3\]"
    ):
        loopq.quantize(load_model(tmp_path, memory=1), tokens(2), group_size=16, method="gptq")


def test_layers_are_read_to_the_models_device(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    ids = torch.from_numpy(tokens(1))
    with torch.no_grad():
        expected = load_model(tmp_path).model(ids).logits
        with accelerator():
            streamed = load_model(tmp_path, memory=1, device=DEVICE)
            assert {p.device.type for p in streamed.model.parameters()} == {DEVICE}
            for _ in range(2):
                torch.testing.assert_close(streamed.model(ids.to(DEVICE)).logits.cpu(), expected)


def test_files_that_lack_a_tensor_are_refused() -> None:
    model = dory()
    tensors = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    del tensors["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(CheckpointError, match=r"the files lack model\.layers\.2\.mlp\.down_proj\.weight"):
        Stream(model, tensors)
