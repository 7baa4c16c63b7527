"""The measurements of a table: saved sums, the answer of a prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benches.zoo.store import save_model
from loopq.analysis.diagnosis.sections import SECTIONS
from loopq.models.load import load_model
from loopq.paper import results
from loopq.paper.bench import Bench
from loopq.paper.compared import FULL, RTN
from loopq.paper.models import open_source
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
