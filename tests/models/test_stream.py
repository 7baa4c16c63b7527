"""A model that is read layer by layer gives the bytes of one in memory, and never holds more than a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loopq
from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.storage.model_files import is_streamed
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


@pytest.mark.parametrize("metric", ["inputs", "loop"])
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
    found = loopq.quantize(streamed, tokens(2), **settings)
    assert all(layer.same_as(found.layers[name]) for name, layer in expected.layers.items())
    before, after = (loopq.evaluate(x, {"INT4": expected}, tokens(2)) for x in (whole, streamed))
    assert after[1].kl.mean() > 0
    assert np.array_equal(after[1].kl, before[1].kl)
    assert float(streamed.system.rollout(Batch(torch.from_numpy(tokens(1)), (0,)), 3).sum()) == float(
        whole.system.rollout(Batch(torch.from_numpy(tokens(1)), (0,)), 3).sum()
    )


def test_what_needs_all_weights_is_refused(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    streamed = load_model(tmp_path, memory=1)
    with pytest.raises(ConfigError, match="layer by layer"):
        loopq.quantize(streamed, tokens(2), group_size=16, fit=3.0)
    with torch.no_grad():
        expected = load_model(tmp_path).model(torch.from_numpy(tokens(1))).logits
        assert torch.equal(streamed.model(torch.from_numpy(tokens(1))).logits, expected)


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
