"""The estimate of a run, printed before it starts."""

from __future__ import annotations

import dataclasses

import pytest

from loopq.run import estimate as module
from loopq.run.budget import Fit
from loopq.run.config import QuantConfig
from loopq.run.estimate import duration
from tests.support.accelerator import DEVICE, accelerator
from tests.support.runs import run_of


def test_gradients_and_the_runs_of_the_text_are_counted(loaded, tokens):
    def of(**changes):
        return run_of(loaded, tokens, QuantConfig.of(**changes)).estimate()

    plain, best = of(), of(preset="best")
    assert (plain.metric.n_gradients, plain.metric_seconds) == (0, 0.0)
    assert "gradients" not in str(plain)
    # An eighth of the ten prompts is run ahead.
    assert best.metric.n_gradients == 4 * (2 + len(tokens.sequences))
    assert best.seconds > best.metric_seconds > 0
    assert "48 gradients for the loop metric" in str(best)
    groups = len(run_of(loaded, tokens).job.selection.distinct_inputs)
    assert of(inputs="asymmetric", sweeps=2).n_passes == 4 * groups
    assert of(inputs="asymmetric", sweeps=2, preset="best").n_passes == 4 * groups + 1
    assert of(inputs="closed-loop").n_passes == 2
    assert of(inputs="equal-rows").n_passes == 1
    assert "passes" not in str(plain)
    assert "2 passes over the calibration set" in str(of(inputs="closed-loop"))


def test_a_memory_limit_means_more_passes(loaded, tokens):
    free = run_of(loaded, tokens).estimate()
    limited = run_of(loaded, tokens, memory=free.memory - 1).estimate()
    assert (free.n_passes, limited.n_passes) == (1, 2)
    assert limited.memory < free.memory
    # Each pass takes the gradients again, for the sums of fewer layers.
    loop = QuantConfig.of(metric="loop")
    free = run_of(loaded, tokens, loop).estimate()
    limited = run_of(loaded, tokens, loop, memory=free.memory - 1).estimate()
    assert limited.metric.n_gradients == 2 * free.metric.n_gradients
    assert limited.metric.memory < free.metric.memory


def test_what_choosing_bits_takes_is_said_too(tiny, tokens):
    def extra(**changes):
        run = run_of(tiny, tokens, QuantConfig.of(**changes))
        return dataclasses.replace(run.source, probe_seconds=0.5).estimate(run.plan).extra

    layers = len(run_of(tiny, tokens).tasks)
    assert extra() == ""
    measured = extra(fit=Fit(3.25, bits=(3, 4), levels=("even",), group_sizes=(16,), n_prompts=4))
    assert measured == f"; besides, about: bits by ablation {4 * 2 * layers * 0.5:.0f} s"
    predicted = extra(fit=Fit(3.25, "fisher", n_prompts=4))
    assert predicted == "; besides, about: bits by fisher 6 s"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_rates_are_those_of_the_models_device(tiny, tokens, monkeypatch):
    monkeypatch.setattr(module, "core_rate", lambda *_: 1 / 0)
    with accelerator():
        tiny.model.to(DEVICE)
        assert run_of(tiny, tokens).estimate().seconds > 0
