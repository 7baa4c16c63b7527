"""The plain module: names and weights without what is around it, and the given module as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import loopq
from loopq.formats.checkpoint import load_into
from loopq.models.from_python import wrap
from loopq.models.plain import plain, plain_modes

_IDS = [[(i * 7 + j * 3) % 64 for j in range(24)] for i in range(6)]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = (
            nn.Embedding(64, 32),
            nn.Sequential(nn.Linear(32, 32)),
            nn.Linear(32, 64),
        )
        self.act = self.squash

    def squash(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = x + self.act(x)
        out: torch.Tensor = self.head(x)
        return out


def _inner(model: Any) -> Any:
    model.body = torch.compile(model.body, backend="eager")
    return model


def _in_place(model: Any) -> Any:
    model.body.compile(backend="eager")
    return model


@pytest.mark.parametrize("wrapped", [
    nn.DataParallel, lambda m: torch.compile(m, backend="eager"), _inner, _in_place,
    lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
])  # fmt: skip
def test_a_wrapped_module_gives_the_checkpoint_of_the_plain_one(wrapped: Callable[[Any], Any]) -> None:
    model = wrapped(_Net().eval())
    result = loopq.quantize(model, _IDS, group_size=16, threads=1, preset="fast")
    same = loopq.quantize(_Net().eval(), _IDS, group_size=16, threads=1, preset="fast")
    assert list(result.layers) == ["body.0.weight"]
    assert result.layers["body.0.weight"].same_as(same.layers["body.0.weight"])
    load_into(_Net(), result)
    assert [m.kl.mean() for m in loopq.evaluate(model, {"q": result}, _IDS, threads=1)] == [
        m.kl.mean() for m in loopq.evaluate(_Net(), {"q": same}, _IDS, threads=1)
    ]


def _old(norm: Any) -> Callable[[Any], None]:
    def apply(layer: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            norm(layer)

    return apply


@pytest.mark.parametrize("change", [
    parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal,
    _old(nn.utils.weight_norm), _old(nn.utils.spectral_norm), lambda m: prune.l1_unstructured(m, "weight", 0.5),
])  # fmt: skip
def test_a_computed_weight_is_quantized_in_an_unchanged_model(
    change: Callable[[Any], None], tmp_path: Any
) -> None:
    model = _Net()
    change(model.body[0])
    model.eval()
    ids = torch.tensor(_IDS)
    before, names = {n: t.clone() for n, t in model.state_dict().items()}, list(model.state_dict())
    with torch.no_grad():
        logits = model(ids)
    loaded = wrap(model)
    assert any("computed from other parameters" in note for note in loaded.report.notes)
    torch.testing.assert_close(loaded.system.rollout(next(_batches(ids)), 3), logits)
    result = loopq.quantize(model, _IDS, group_size=16, threads=1, preset="fast", out=tmp_path / "q")
    assert set(result.layers) | set(result.dense) == set(_Net().state_dict())
    again = loopq.load(tmp_path / "q", wrap(model))
    stored = torch.from_numpy(result.layers["body.0.weight"].dequantize())
    assert torch.equal(again.model.body[0].weight, stored)
    assert list(model.state_dict()) == names
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    load_into(_Net(), result)


def _batches(ids: torch.Tensor) -> Any:
    yield loopq.systems.base.Batch(ids, tuple(range(len(ids))))


def test_a_plain_module_is_itself() -> None:
    model = _Net()
    assert plain(model) == (model, ())


class _Kept(_Net):
    """A model with a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(1))
        self.head.weight = nn.Parameter(torch.randn(64, 32))
        self.embed.weight = self.head.weight


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("mode", [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16),
])  # fmt: skip
def test_modes_of_the_caller_change_no_byte(mode: Callable[[], Any], made_inside: bool) -> None:
    def found(model: Any) -> tuple[Any, ...]:
        result = loopq.quantize(model, _IDS, group_size=16, threads=1)
        assert next(iter(result.layers.values())).report["metric"] == "loop"
        measured = loopq.evaluate(model, {"q": result}, _IDS[:2])
        return (result.digest(), measured[1].kl.tolist(), loopq.generate(model, _IDS[0], n_tokens=3))

    plainly = found(_Kept())
    model = _Kept()
    with warnings.catch_warnings(), mode():
        warnings.filterwarnings("ignore", message=".*prompts were used for calibration")
        assert found(_Kept() if made_inside else model) == plainly
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert torch.is_grad_enabled() == (mode not in (torch.no_grad, torch.inference_mode))


def test_weights_made_under_inference_mode_are_copied_once() -> None:
    with torch.inference_mode():
        given = _Kept()
        with plain_modes():
            model, notes = plain(given)
    assert len(notes) == 1
    assert model.embed.weight is model.head.weight
    assert not any(t.is_inference() for t in model.state_dict().values())
    assert all(torch.equal(t, given.state_dict()[n]) for n, t in model.state_dict().items())
