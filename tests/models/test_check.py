"""`loopq check`: verdicts on models that fit, and on models that do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from loopq.errors import ConfigError
from loopq.models.check import CheckReport, check_model, vocabulary
from loopq.systems import SYSTEMS, find_system
from loopq.systems.base import LoopedSystem
from tests.support.looptoys import LinearLoop, LinearSystem
from tests.support.systems import CASES, as_loaded, build, open_system

pytestmark = pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")


def _verdicts(report: CheckReport) -> dict[str, bool | None]:
    return {v.check: v.ok for v in report.verdicts}


def test_a_model_passes_in_float16() -> None:
    system = open_system(CASES["Huginn"])
    system.model.to(torch.float16)
    report = check_model(as_loaded(system))
    assert report.ok, "\n".join(report.lines())


def test_short_groups_and_left_out_parameters_are_noted() -> None:
    report = check_model(as_loaded(open_system(CASES["Parcae"])))
    text = "\n".join(report.lines())
    assert "32 inputs: the last group of 128 has 32 columns" in text
    assert "left out: transformer.adapter.B (bare parameter" in text


def test_a_loop_that_a_run_found_is_printed() -> None:
    report = check_model(as_loaded(open_system(CASES["generic HRM-Text"])))
    text = "\n".join(report.lines())
    assert "32 looped parameters, depth 6, run with 2 prompts of 8 tokens" in text
    assert "model.L_module.layers.0.self_attn.q_proj.weight: 6 calls, rows 16 each" in text
    assert text.index("model.L_module.layers.0") < text.index("model.H_module.layers.0")


def test_unexpected_tensors_fail() -> None:
    system = open_system(CASES["Huginn"])
    report = check_model(as_loaded(system, unexpected=("stray.weight",)))
    assert not report.ok
    assert _verdicts(report)["loaded whole"] is False


def _broken(change: str) -> LoopedSystem:
    """An adapter for the Huginn-like model with one mistake in it."""
    cls = SYSTEMS.get("huginn")

    class Broken(cls):  # type: ignore[misc, valid-type]
        def shared_parameters(self, n_steps: int) -> Any:
            shared = super().shared_parameters(n_steps)
            if change == "calls":
                return (dataclasses.replace(shared[0], invocations=n_steps + 1), *shared[1:])
            return shared[1:] if change == "nothing forgotten" else shared

        def rollout(self, batch: Any, n_steps: int) -> Any:
            out = super().rollout(batch, 3 if change == "depth" and n_steps else n_steps)
            if change == "same seed, same bits":
                return out + 1e-6 * torch.randn_like(out)
            if change == "rollout":
                return out[:, -1:]
            return out

        def noise(self, batch: Any) -> Any:
            noise = super().noise(batch)
            return noise.flip(0) if change == "initial state" else noise

        def step(self, state: Any, embedding: Any, t: int, n_steps: int) -> Any:
            after = super().step(state, embedding, t, n_steps)
            return after * 1.01 if change == "single steps" else after

    return Broken(build(CASES["Huginn"]))


@pytest.mark.parametrize(
    "change",
    ["calls", "nothing forgotten", "rollout", "same seed, same bits", "single steps", "initial state", "depth"],
)  # fmt: skip
def test_a_mistake_is_found_by_its_check(change: str) -> None:
    report = check_model(as_loaded(_broken(change)))
    assert not report.ok
    failed = [name for name, ok in _verdicts(report).items() if ok is False]
    assert failed[0] == change
    assert "FAILED" in "\n".join(report.lines())
    assert (len(report.verdicts) == 3) == (change == "rollout")


def test_broken_tie_is_found() -> None:
    system = open_system(CASES["transformers Zamba"])
    shared = system.shared_parameters(system.n_steps)
    other = system.model.get_submodule(shared[0].owners[1])

    class Stale(SYSTEMS.get("zamba")):  # type: ignore[misc]
        def shared_parameters(self, n_steps: int) -> Any:
            return shared

    other.weight = torch.nn.Parameter(other.weight.detach().clone())
    report = check_model(as_loaded(Stale(system.model)))
    assert _verdicts(report)["weights of the loop"] is False
    assert "tie is broken" in "\n".join(report.lines())


def test_failure_of_the_models_own_code_is_a_verdict() -> None:
    system = open_system(CASES["Ouro"])
    del system.model.model.norm
    report = check_model(as_loaded(system))
    assert _verdicts(report)["rollout"] is False
    assert "the model raises AttributeError" in "\n".join(report.lines())


def test_overflow_is_found() -> None:
    model = build(CASES["Ouro"])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e30)
    report = check_model(as_loaded(find_system(model.half())))
    assert _verdicts(report)["rollout"] is False
    assert "bfloat16 or float32" in "\n".join(report.lines())


def test_depth_0_must_be_refused() -> None:
    report = check_model(as_loaded(LinearSystem(LinearLoop())))
    assert any("a rollout of depth 0 is not refused" in line for line in report.lines())


def test_a_model_without_an_embedding_has_no_known_vocabulary() -> None:
    with pytest.raises(ConfigError, match="Linear: no vocab_size and no embedding in it"):
        vocabulary(LinearSystem(torch.nn.Linear(2, 2)))
