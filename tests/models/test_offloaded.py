"""Modules with weights on disk or elsewhere (accelerate) give the same bytes as those in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopq
from loopq.errors import ConfigError
from loopq.models.experts import unfuse
from loopq.models.from_python import wrap
from loopq.storage.model_files import is_streamed
from loopq.systems.base import Batch
from loopq.systems.dory import Dory
from tests.support.marks import slow_unless
from tests.support.vendors import dory, inkling, tokens

pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed; run `make setup`")
_SETTINGS = {"group_size": 16, "method": "gptq"}


def _device_map(model: Any) -> dict[str, str]:
    rest = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    layers = {f"model.layers.{i}": ("disk", "cpu")[i % 2] for i in range(len(model.model.layers))}
    return dict.fromkeys(["lm_head", *rest], "cpu") | layers


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind is dory, [dory, inkling]))
def test_parts_on_the_disk_are_read_layer_by_layer(kind: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    plain = kind()
    plain.save_pretrained(tmp_path / "model")
    given = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=_device_map(plain), offload_folder=str(tmp_path / "elsewhere")
    ).eval()
    assert any(p.is_meta for p in given.parameters())
    loaded = wrap(given)
    assert is_streamed(loaded.model)
    result = loopq.quantize(loaded, tokens(), **_SETTINGS)
    unfuse(plain)
    expected = loopq.quantize(plain, tokens(), **_SETTINGS)
    assert set(result.layers) == set(expected.layers)
    assert all(layer.same_as(result.layers[name]) for name, layer in expected.layers.items())
    assert result.dense.keys() == expected.dense.keys()
    # The module that was given still runs by its hooks. Mapped weights lie otherwise in memory, which moves last bits.
    ids = torch.from_numpy(tokens(1))
    with torch.no_grad():
        hooked, logits = given(ids, use_cache=False).logits, plain(ids, use_cache=False).logits
    torch.testing.assert_close(hooked, logits, rtol=1e-3, atol=1e-3)
    assert any(p.is_meta for p in given.parameters())


def test_accelerates_own_offloading(tmp_path: Path) -> None:
    import accelerate

    plain, given = dory(), dory()
    accelerate.disk_offload(given, tmp_path, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in given.parameters())
    batch = Batch(torch.from_numpy(tokens(1)), (0,))
    expected = Dory(plain).rollout(batch, 3)
    assert torch.equal(wrap(given).system.rollout(batch, 3), expected)
    elsewhere = dory()
    accelerate.cpu_offload(elsewhere, execution_device=torch.device("cpu"))
    assert torch.equal(wrap(elsewhere).system.rollout(batch, 3), expected)


class _Layer(nn.Module):
    """A linear layer that is called, one that is used without a call, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.used, self.conv = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Conv1d(32, 32, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.called(x)) + self.conv(nn.functional.linear(x, self.used.weight).mT).mT


class _Hops(nn.Module):
    """Two such layers, called four times in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i in range(8):
            x = nn.functional.layer_norm(self.layers[i % 2](x), (32,))
        return self.head(x)


def test_weights_without_a_call_of_their_module_are_observed_there(tmp_path: Path) -> None:
    import accelerate

    given = _Hops()
    accelerate.disk_offload(given, tmp_path, execution_device=torch.device("cpu"))
    for method in ("gptq", "gptq-cd"):
        result, expected = (
            loopq.quantize(m, tokens(), group_size=16, method=method) for m in (given, _Hops())
        )
        assert len(expected.layers) == len(result.layers) == 6
        assert all(layer.same_as(result.layers[name]) for name, layer in expected.layers.items())


def test_an_adapter_around_such_a_module_is_refused(tmp_path: Path) -> None:
    import accelerate

    given = dory()
    accelerate.cpu_offload(given, execution_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="no values"):
        wrap(Dory(given))
