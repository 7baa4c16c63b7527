"""Buffers that no file holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopq.errors import CheckpointError
from loopq.models import buffers
from loopq.models.buffers import fresh_buffers, repair_buffers, unsaved_buffers
from loopq.models.load import load_model
from tests.support.systems import CASES, build


def test_buffers_of_remote_code_are_right_after_loading(remote_folder: Path) -> None:
    """transformers 5 leaves old memory in them; transformers 4 loads them correctly."""
    loaded = load_model(remote_folder, trust_remote_code=True)
    expected = 1.0 / 10.0 ** torch.arange(16).div(16)
    assert torch.equal(loaded.model.model.layers[0].self_attn.inv_freq, expected)
    assert loaded.report.repaired in ((), ("model.layers.0.self_attn.inv_freq",))


def test_damaged_buffer_is_found_and_set_right() -> None:
    model = build(CASES["transformers HRM-Text"])
    right = {name: b.clone() for name, b in unsaved_buffers(model).items()}
    assert repair_buffers(model) == ()
    model.model.rotary_emb.inv_freq[1] = float("nan")
    assert repair_buffers(model) == ("model.rotary_emb.inv_freq",)
    model.model.rotary_emb._buffers["inv_freq"] = torch.empty(8, device="meta")
    assert repair_buffers(model) == ("model.rotary_emb.inv_freq",)
    assert all(torch.equal(b, right[name]) for name, b in unsaved_buffers(model).items())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    repair_buffers(model)
    assert torch.equal(state, torch.get_rng_state())


def test_buffer_that_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(build: Callable[[nn.Module], dict[str, torch.Tensor]]) -> None:
        monkeypatch.setattr(buffers, "fresh_buffers", build)
        repair_buffers(model)

    model = build(CASES["transformers HRM-Text"])
    name = "model.rotary_emb.inv_freq"
    model.model.rotary_emb.inv_freq.zero_()
    with pytest.raises(CheckpointError, match=r"not the same in two new models"):
        again(lambda m: {n: torch.randn_like(b) for n, b in unsaved_buffers(m).items()})
    with pytest.raises(CheckpointError, match=r"another shape"):
        again(lambda m: {})
    nan = torch.full_like(model.model.rotary_emb.inv_freq, float("nan"))
    with pytest.raises(CheckpointError, match=r"not the same"):
        again(lambda m: fresh_buffers(m) | {name: nan})


def test_class_that_cannot_be_built_again_is_refused() -> None:
    class Once(nn.Module):
        built = 0

        def __init__(self, config: Any) -> None:
            if Once.built:
                raise ValueError("only once")
            Once.built += 1
            super().__init__()
            self.config = config
            self.register_buffer("mask", torch.ones(3), persistent=False)

    with pytest.raises(CheckpointError, match=r"cannot be built again.*only once"):
        repair_buffers(Once({}))
