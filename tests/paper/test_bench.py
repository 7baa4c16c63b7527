"""The measurements of a table: saved sums, the answer of a prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benches.zoo.store import save_model
from loopq.analysis.diagnosis.sections import SECTIONS
from loopq.calibrate.calls import CallSet, given_calls
from loopq.calibrate.prompts import register_prompts
from loopq.models.from_python import wrap
from loopq.models.load import LoadedModel, load_model
from loopq.paper import results
from loopq.paper.bench import Bench
from loopq.paper.compared import FULL, RTN
from loopq.paper.models import open_source, register_source
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent
from tests.support.paper import SMALL, bench, save


def test_what_is_saved_belongs_to_weights_prompts_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, work = save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=2), tmp_path / "work"
    first = results.make("rank", [bench(folder)], work, Silent())
    monkeypatch.setattr(Bench, "sums", property(lambda self: pytest.fail("collected again")))
    assert results.make("rank", [bench(folder)], work, Silent()).to_json() == first.to_json()
    for other in (
        bench(folder, SMALL.changed(n_calibration=3)),
        Bench(open_source(folder), SMALL, Execution(seed=1)),
    ):
        with pytest.raises(pytest.fail.Exception, match="collected again"):
            results.make("rank", [other], work, Silent())
    model = load_model(folder).model
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    save_model(model, Path(folder))
    with pytest.raises(pytest.fail.Exception, match="collected again"):
        results.make("rank", [bench(folder)], work, Silent())


def test_layers_rounded_alone_are_measured_once_for_two_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has Figure 4 and makes Table 16."""
    folder, work = save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=2), tmp_path / "work"
    results.make("loop", [bench(folder)], work, Silent())
    section = dataclasses.replace(SECTIONS.get("ablation"), run=lambda _: pytest.fail("rounded again"))
    monkeypatch.setattr(SECTIONS, "get", lambda _: section)
    assert results.make("sensitivity", [bench(folder)], work, Silent()).found
    with pytest.raises(pytest.fail.Exception, match="rounded again"):
        results.make("sensitivity", [bench(folder)], tmp_path / "other", Silent())


def test_the_last_token_counts_as_the_answer(huginn: Bench) -> None:
    measured = huginn.measure({RTN: huginn.rtn()})
    batch = next(huginn.model.evaluation.batches(8))
    with torch.no_grad():
        logits = huginn.system.rollout(batch, huginn.depth)
    expected = (logits[:, -2].argmax(-1) == batch.input_ids[:, -1]).double().tolist()
    assert measured["variants"][FULL]["answered"] == expected


class TwoLoops(nn.Module):
    """A loop of four steps and a shorter one behind it, on float inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Run both loops."""
        for layer, n in ((self.first, 4), (self.second, 2)):
            for _ in range(n):
                x = x + torch.tanh(layer(x))
        return x


@pytest.fixture
def two_loops(monkeypatch: pytest.MonkeyPatch) -> Bench:
    def prompts(loaded: LoadedModel, use: str, n_prompts: int, draw: int) -> CallSet:
        generator = torch.Generator().manual_seed(2 * draw + (use == "evaluation"))
        calls, _ = given_calls([torch.randn(16, 8, generator=generator) for _ in range(n_prompts)], n_prompts)
        assert calls is not None
        return CallSet.of(loaded, calls)

    def opened(data: Path | None, **loading: Any) -> LoadedModel:
        return dataclasses.replace(wrap(TwoLoops()), config={"model_type": "two_loops"})

    monkeypatch.setattr("loopq.paper.models._OPENERS", {})
    monkeypatch.setattr("loopq.calibrate.prompts._SOURCES", {})
    register_source("two_loops", opened)
    register_prompts("two_loops", prompts)
    return Bench(open_source("two_loops"), SMALL, Execution(threads=1))


def test_a_model_of_calls_has_the_tables_that_need_no_logits(two_loops: Bench) -> None:
    for name in ("main-table", "horizon", "awq"):
        made = results.make(name, [two_loops], None, Silent())
        assert not made.refused
        assert made.found[0]["output"] == "hidden"
        assert made.shown.claims
    assert made.found[0]["n_steps"] == 4
    logits = "the model has no logits, so it predicts no token"
    assert results.make("agreement", [two_loops], None, Silent()).refused == {"two_loops": logits}


@pytest.mark.parametrize(
    ("asked", "steps"),
    [("0:3", ((0, 1, 2), (0, 1))), ("3", ((3,), (1,))), ("1:", ((1, 2, 3), (1,))), ("first", ((0,), (0,)))],
)
def test_a_shorter_loop_has_those_of_the_steps_that_it_has(
    two_loops: Bench, asked: str, steps: tuple[tuple[int, ...], ...]
) -> None:
    tasks = two_loops.collected.plan(two_loops.gptq(asked)).tasks
    assert {t.name: t.steps for t in tasks} == dict(
        zip(("first.weight", "second.weight"), steps, strict=True)
    )
