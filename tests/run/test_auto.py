"""Metric auto: the loop metric where its gradients are cheap, the same choice for few prompts and for many."""

from __future__ import annotations

import pytest

import loopq
from loopq.calibrate.data import TokenSet
from loopq.quantizers.loop_metric import LEAST, n_gradient_prompts
from loopq.run import auto
from loopq.run.config import QuantConfig
from loopq.terminal.progress import Silent
from tests.support.runs import run_of


class Notes(Silent):
    """Keeps what a run says."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def test_a_share_of_the_prompts_costs_the_same_multiple(loaded, tokens):
    assert [n_gradient_prompts(None, n) for n in (4, LEAST, 2 * LEAST, 129)] == [4, LEAST, LEAST, 65]
    assert [n_gradient_prompts(8, n) for n in (4, 129)] == [4, 8]
    whole = TokenSet(tokens.sequences * 32, "repeated", "prompts")
    config = QuantConfig.of(metric="loop", group_size=20)
    few, many = (
        auto.cost_of_gradients(*run_of(loaded, whole.take(0, n), config)) for n in (2 * LEAST, 8 * LEAST)
    )
    assert few == pytest.approx(many, rel=0.2)
    # A number that is fixed costs the more, the fewer prompts there are.
    fixed = config.changed(metric_prompts=2 * LEAST)
    dear = auto.cost_of_gradients(*run_of(loaded, whole.take(0, 2 * LEAST), fixed))
    assert dear > 1.8 * few


@pytest.mark.parametrize(("affordable", "metric"), [(1e9, "loop"), (1e-9, "inputs")])
def test_the_choice_is_made_by_cost_and_said(loaded, tokens, monkeypatch, affordable, metric):
    monkeypatch.setattr(auto, "AFFORDABLE", affordable)
    notes = Notes()
    result = loopq.quantize(loaded, tokens, group_size=20, threads=1, progress=notes)
    assert result.settings["quantization"]["layer"]["method"]["metric"]["kind"] == metric
    (said,) = [line for line in notes.lines if line.startswith("metric ")]
    assert said.startswith(f"metric {metric}")
    assert f"gradients on {len(tokens.sequences)} prompts cost" in said
    assert "preset" in said


def test_where_half_of_the_prompts_is_too_dear_fewer_are_taken(loaded, tokens, monkeypatch):
    whole = TokenSet((tokens.sequences * 20)[:160], "repeated", "prompts")
    run = run_of(loaded, whole, QuantConfig.of(group_size=20))
    half = auto.cost_of_gradients(*run.with_config(run.config.with_metric("loop")))

    def chosen(share, config=None):
        monkeypatch.setattr(auto, "AFFORDABLE", share * half)
        return auto.choose_metric(*(run if config is None else run.with_config(config)))

    assert {t.gradients for t in chosen(1.01).tasks} == {(None, 2)}
    fewer = chosen(0.5)
    ((prompts, draws),) = {t.gradients for t in fewer.tasks}
    assert draws == 2
    assert LEAST < prompts <= 40
    assert auto.cost_of_gradients(fewer, run.source) <= 0.5 * half
    # Fewer than the least are no metric, and a number that is asked for is not changed.
    assert {t.gradients for t in chosen(0.19).tasks} == {None}
    asked = run.config.changed(metric_prompts=80)
    assert {t.gradients for t in chosen(0.5, asked).tasks} == {None}


def test_what_gradients_cannot_pass_takes_the_inputs(loaded, tokens, monkeypatch):
    def fails(*args):
        raise RuntimeError("element 0 of tensors does not require grad")

    monkeypatch.setattr(auto, "draws", fails)
    monkeypatch.setattr(auto, "AFFORDABLE", 1e9)
    notes = Notes()
    loopq.quantize(loaded, tokens.take(0, 2), group_size=20, threads=1, progress=notes)
    assert any("a backward pass fails: element 0 of tensors" in line for line in notes.lines)
    monkeypatch.setattr(auto, "available_bytes", lambda: 1)
    loopq.quantize(loaded, tokens.take(0, 2), group_size=20, threads=1, progress=notes)
    assert any("GiB and 0.0 are free" in line for line in notes.lines)
