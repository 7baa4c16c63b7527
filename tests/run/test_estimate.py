"""The estimate of a run, printed before it starts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import loopq._native as native
from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError
from loopq.models.build import build_shape
from loopq.quantizers import base
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.twin import solve as twin
from loopq.run import estimate as module
from loopq.run import solver
from loopq.run.budget import Fit
from loopq.run.config import QuantConfig
from loopq.run.estimate import duration
from loopq.run.model_source import ModelSource
from loopq.settings.execution import Execution
from loopq.storage.model_files import set_source
from tests.support.accelerator import DEVICE, accelerator
from tests.support.looptoys import LinearLoop, LinearSystem
from tests.support.runs import run_of
from tests.support.vendors import dory, inkling

PARTS = ["rollouts", "gradients", "Hessians", "factors", "solves", "files"]


def test_gradients_and_the_runs_of_the_text_are_counted(loaded, tokens):
    def of(**changes):
        return run_of(loaded, tokens, QuantConfig.of(**changes)).estimate()

    plain, best = of(), of(preset="best")
    assert list(plain.seconds) == list(best.seconds) == PARTS
    assert all(s > 0 for s in best.seconds.values())
    assert (plain.n_gradients, plain.seconds["gradients"]) == (0, 0.0)
    assert "gradients" not in str(plain)
    # An eighth of the ten prompts is run ahead.
    assert best.n_gradients == 4 * (2 + len(tokens.sequences))
    assert "48 gradients for the loop metric" in str(best)
    groups = len(run_of(loaded, tokens).job.selection.distinct_inputs)
    assert of(inputs="asymmetric", sweeps=2).n_passes == 4 * groups
    assert of(inputs="asymmetric", sweeps=2, preset="best").n_passes == 4 * groups + 1
    assert "passes" not in str(plain)
    assert f"{2 * groups} passes over the calibration set" in str(of(inputs="asymmetric"))


def test_a_memory_limit_means_more_passes(loaded, tokens):
    # A rotated solve of the widest layer takes more than all sums of so small a model.
    plain = QuantConfig.of(rotation="none")
    free = run_of(loaded, tokens, plain).estimate()
    limited = run_of(loaded, tokens, plain, memory=free.memory - 1).estimate()
    assert (free.n_passes, limited.n_passes) == (1, 2)
    assert limited.memory < free.memory
    assert limited.fits
    # Each pass takes the gradients again, for the sums of fewer layers.
    loop = QuantConfig.of(metric="loop", rotation="none")
    free = run_of(loaded, tokens, loop).estimate()
    limited = run_of(loaded, tokens, loop, memory=free.memory - 1).estimate()
    assert limited.n_gradients == 2 * free.n_gradients


@pytest.fixture
def rates(monkeypatch):
    """Rates that do not depend on the machine."""
    for name in ("core_rate", "product_rate"):
        monkeypatch.setattr(module, name, lambda *_: 1e9)
    monkeypatch.setattr(module, "unit_seconds", lambda *_: 1e-9)


def cost(run, token=1e-3):
    return module.estimate(run.plan, run.job, token, 0.0).seconds


def test_each_part_grows_with_prompts_steps_and_layers(tiny, tokens, rates):
    loop = QuantConfig.of(metric="loop")
    whole = cost(run_of(tiny, tokens, loop))
    less = cost(run_of(tiny, tokens.take(0, 5), loop))
    assert [part for part in PARTS if less[part] < whole[part]] == ["rollouts", "gradients", "Hessians"]
    first = run_of(tiny, tokens, QuantConfig.of(metric="loop", steps="0"))
    assert cost(first)["Hessians"] < whole["Hessians"]
    # Without times, a rollout counts by the multiply-adds of all its steps.
    shallow = ModelSource.of_shape(tiny.system, tokens, loop, n_steps=1, execution=Execution(threads=1))
    deep = ModelSource.of_shape(tiny.system, tokens, loop, n_steps=2, execution=Execution(threads=1))
    assert (
        shallow.estimate(shallow.plan(loop)).seconds["rollouts"]
        < deep.estimate(deep.plan(loop)).seconds["rollouts"]
    )
    run = run_of(tiny, tokens, loop)
    fewer = cost(run_of(tiny, tokens, QuantConfig.of(metric="loop", exclude=(run.tasks[-1].name,))))
    assert fewer["solves"] < whole["solves"]
    assert fewer["factors"] < whole["factors"]


def test_wider_searches_take_longer(tiny, tokens, rates):
    def solves(**changes):
        return cost(run_of(tiny, tokens, QuantConfig.of(**changes)))["solves"]

    assert (
        solves(method="rtn")
        < solves(method="gptq")
        < solves(beam=4)
        < solves(beam=16)
        < solves(metric="loop")
    )
    assert solves(method="trellis", state_bits=8) < solves(method="trellis", state_bits=10)
    once, twice = ({"inputs": "asymmetric", "sweeps": n} for n in (1, 2))
    assert solves(**twice) == pytest.approx(2 * solves(**once))


def test_what_choosing_bits_takes_is_a_part(tiny, tokens, rates):
    run = run_of(tiny, tokens, QuantConfig.of(levels="even", fit=Fit(3.25, bits=(3, 4), group_sizes=(16,))))
    seconds = cost(run)
    rollouts = seconds["rollouts"] * 2 * len(run.tasks)
    assert seconds["choice of grids"] == pytest.approx(rollouts + 2 * seconds["solves"])


@pytest.mark.parametrize(
    "settings", [{"method": "gptq"}, {"metric": "loop"}, {"method": "trellis", "state_bits": 10}]
)
def test_a_small_solve_is_timed_for_each_method(settings):
    config = LayerConfig.of(group_size=16, bits=3, levels="even", **settings)
    assert 0 < module.unit_seconds(config.method, config.grid, 64) < 1e-3


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_rates_are_those_of_the_models_device(tiny, tokens, monkeypatch):
    fast = run_of(tiny, tokens, QuantConfig.of(preset="fast"))
    monkeypatch.setattr(module, "_column_seconds", lambda *_: 1 / 0)
    assert fast.estimate().seconds["solves"] < 1e5
    monkeypatch.setattr(module, "core_rate", lambda *_: 1 / 0)
    monkeypatch.setattr(module, "_column_seconds", lambda *_: 1e6)
    with accelerator():
        tiny.model.to(DEVICE)
        seconds = run_of(tiny, tokens, fast.config).estimate().seconds["solves"]
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


_PLAIN = QuantConfig().with_metric("inputs")


def shaped(system, memory, config=_PLAIN, batch_size=8):
    prompts = TokenSet((np.zeros(64, np.int64),) * 16, "a text", "windows")
    how = Execution(memory=memory, batch_size=batch_size, threads=1)
    source = ModelSource.of_shape(system, prompts, config, execution=how)
    return source.estimate(source.plan(config))


@pytest.mark.parametrize("kind", [dory, inkling])
def test_less_memory_means_more_passes_and_layers_that_do_not_fit_are_read(kind, tmp_path):
    model = kind()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    system = build_shape(tmp_path)
    assert all(p.is_meta for p in system.model.parameters())
    small = build_shape(tmp_path, device="cpu").model
    assert all(0 < p.std() < 1 for p in small.parameters() if p.ndim > 1)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    plenty = shaped(system, 1 << 30)
    assert (plenty.weights, plenty.held, plenty.n_passes) == (weights, weights, 1)
    assert plenty.limit == (1 << 30) + weights
    assert plenty.fits
    assert plenty.output < weights
    less = shaped(system, plenty.memory - 1)
    assert less.n_passes > 1
    assert less.memory < plenty.memory
    default = shaped(system, 1 << 30, QuantConfig.of(metric="loop"))
    assert default.seconds["gradients"] > plenty.seconds["gradients"] == 0
    with pytest.raises(ConfigError, match="above the limit"):
        shaped(system, 1000)
    set_source(system.model, {})
    streamed = shaped(system, 1 << 30)
    assert streamed.held < weights
    assert streamed.limit - streamed.held == plenty.limit - plenty.held
    assert streamed.peak - streamed.process < plenty.peak - plenty.process
    assert "layer by layer" in "\n".join(streamed.lines())
    alone = shaped(system, 1 << 30, batch_size=1)
    assert alone.seconds["reading weights"] > 2 * streamed.seconds["reading weights"] > 0
    assert "reading weights" not in plenty.seconds


def test_sizes_are_those_of_the_shapes():
    config = QuantConfig.of(method="gptq", bits=4, group_size=4)
    system = LinearSystem(LinearLoop(width=8, vocab=11))
    sizes = shaped(system, 1 << 30, config)
    wide, codes = (16, 8), 8 * 16 + 8 * 8
    assert sizes.weights == sizes.held == 8 * (codes + 2 * 11 * 8)
    assert sizes.codes == codes
    assert sizes.output == sizes.weights - 8 * codes + codes // 2 + 2 * (8 * 4 + 8 * 2)
    assert (sizes.n_passes, sizes.n_tokens) == (1, 16 * 64)
    sums = sum(8 * w * (w + 1) for w in wide)
    assert sums < sizes.memory < sums + 100_000


def test_a_wider_model_takes_more_memory():
    narrow, wide = (shaped(LinearSystem(LinearLoop(width=w)), 1 << 30) for w in (32, 64))
    assert narrow.memory < wide.memory
    assert narrow.added < wide.added
    assert narrow.seconds["factors"] < wide.seconds["factors"]


def test_what_does_not_fit_is_said():
    enough = shaped(LinearSystem(LinearLoop()), 1 << 30)
    short = dataclasses.replace(enough, limit=enough.held + enough.memory - 1)
    assert enough.fits
    assert not short.fits
    assert "above the limit" in "\n".join(short.lines())
    assert "above the limit" not in "\n".join(enough.lines())
