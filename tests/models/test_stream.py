"""A model that is read layer by layer gives the bytes of one in memory, and never holds more than a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopq
from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.storage.model_files import is_streamed
from tests.support.accelerator import DEVICE, accelerator
from tests.support.marks import slow_unless
from tests.support.vendors import dory, inkling, tokens


def _held(model: nn.Module) -> int:
    """Bytes of all parameters that have memory of their own."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind is dory, [dory, inkling]))
def test_bytes_are_those_of_a_run_in_memory(kind: Any, tmp_path: Path) -> None:
    kind().save_pretrained(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    streamed = load_model(tmp_path / "model", memory=size // 2)
    assert is_streamed(streamed.model)
    most = []
    for layer in streamed.model.model.layers:
        layer.register_forward_hook(lambda *_: most.append(_held(streamed.model)))
    settings = {"group_size": 16, "metric": "inputs", "descent": 2, "memory": 1 << 20}
    loopq.quantize(streamed, tokens(), out=tmp_path / "streamed", **settings)
    assert max(most) < 0.6 * size
    loopq.quantize(tmp_path / "model", tokens(), out=tmp_path / "whole", **settings)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "streamed").iterdir())
    for name in files:
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert all(p.untyped_storage().nbytes() <= 8 for p in streamed.model.model.layers.parameters())


def test_what_needs_all_weights_is_refused(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    streamed = load_model(tmp_path, memory=1)
    for settings in ({"metric": "loop"}, {"preset": "best"}):
        with pytest.raises(ConfigError, match="layer by layer"):
            loopq.quantize(streamed, tokens(2), group_size=16, **settings)
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
