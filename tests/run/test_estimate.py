"""The estimate of a run, printed before it starts."""

from __future__ import annotations

import dataclasses

import pytest

import loopq._native as native
from loopq.quantizers import base
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.twin import solve as twin
from loopq.run import estimate as module
from loopq.run import solver
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
    assert "passes" not in str(plain)
    assert f"{2 * groups} passes over the calibration set" in str(of(inputs="asymmetric"))


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
    measured = extra(levels="even", fit=Fit(3.25, bits=(3, 4), group_sizes=(16,)))
    n_prompts = min(16, len(tokens.sequences))
    assert measured == f"; besides, about: choice of grids {duration(n_prompts * 2 * layers * 0.5)}"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_rates_are_those_of_the_models_device(tiny, tokens, monkeypatch):
    fast = run_of(tiny, tokens, QuantConfig.of(preset="fast"))
    monkeypatch.setattr(module, "_column_seconds", lambda *_: 1 / 0)
    assert fast.estimate().seconds < 1e5
    monkeypatch.setattr(module, "core_rate", lambda *_: 1 / 0)
    monkeypatch.setattr(module, "_column_seconds", lambda *_: 1e6)
    with accelerator():
        tiny.model.to(DEVICE)
        seconds = run_of(tiny, tokens, fast.config).estimate().seconds
        groups = solver.together(fast.tasks, DEVICE, None)
    assert seconds == pytest.approx(module.launch_seconds(groups, DEVICE, 8), abs=1e5)


@pytest.mark.parametrize(
    "settings", [{"method": "gptq"}, {"metric": "inputs"}, {"metric": "loop", "passes": 0}]
)
def test_columns_are_counted_as_often_as_devices_go_through(tiny, tokens, monkeypatch, settings):
    plain = {} if settings.get("method") else {"beam": 1, "descent": 0}
    run = run_of(tiny, tokens, QuantConfig.of(bits=3, group_size=16, **settings, **plain))
    for place in (base, solver):
        monkeypatch.setattr(place, "has_twins", lambda device: True)
    # Some layers run together, but not all.
    monkeypatch.setattr(solver, "ROWS_TOGETHER", 150)
    monkeypatch.setattr(module, "_column_seconds", lambda *_: 1.0)
    columns = []

    def counted(solve):
        def call(target, *more):
            # Under the loop metric, places of a block are solved one tile after the other.
            places = more[1].row.shape[2] if solve is coupled else 1
            columns.append(target.shape[2] * -(-places // native.TOGETHER))
            return solve(target, *more)

        return call

    coupled = twin.coupled
    for name in ("sweep", "settle", "coupled"):
        monkeypatch.setattr(twin, name, counted(getattr(twin, name)))
    run.solve()
    groups = solver.together(run.tasks, "cpu", run.execution.memory)
    assert 1 < len(groups) < len(run.tasks)
    assert module.launch_seconds(groups, "cpu", 8) == sum(columns)


@pytest.mark.parametrize("metric", ["inputs", "loop"])
def test_a_narrow_layer_is_solved_on_the_device(monkeypatch, metric):
    config, solved = LayerConfig.of(metric=metric, group_size=16), []
    monkeypatch.setattr(type(config.method), "twin", lambda self, problems: solved.extend(problems))
    with accelerator():
        assert module._column_seconds(config.method, config.grid, 24, DEVICE) > 0
    assert {p.device for p in solved} == {DEVICE}
    assert {p.target.shape for p in solved} == {(native.TOGETHER, 24)}
    assert {p.metric is not None for p in solved} == {metric == "loop"}
    rounded = LayerConfig.of(method="rtn", group_size=16)
    assert module._column_seconds(rounded.method, rounded.grid, 24, DEVICE) == 0.0
