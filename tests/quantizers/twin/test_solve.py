"""Which layers run together on a device, and the product's way through the twin."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import loopq.quantizers.base as base
import loopq.run.solver as solver
from loopq.errors import NonFiniteError, SolveError
from loopq.quantizers.twin import solve
from loopq.quantizers.twin.solve import batches
from loopq.run.config import QuantConfig
from loopq.terminal.progress import Silent
from tests.support.runs import run_of
from tests.support.twins import loss, problems


@pytest.fixture
def twins(monkeypatch):
    """The CPU as a device with twins, which solves some layers of a model together, but not all."""
    monkeypatch.setattr(solver, "ROWS_TOGETHER", 150)
    for module in (base, solver):
        monkeypatch.setattr(module, "has_twins", lambda device: True)


class Notes(Silent):
    """Keeps what a run notes."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_layers_alike_run_together_and_no_more_than_fit(monkeypatch):
    _, first = problems(24, 40, 2, method="gptq", group_size=8)
    _, second = problems(24, 40, 2, seed=1, method="gptq", group_size=8)
    _, other = problems(24, 40, 1, method="gptq", group_size=8, bits=3)
    found = list(batches([*first, *other, *second], joined=True))
    assert [batch.inputs for batch in found] == [[first, second], [other]]
    apart = list(batches([*first, *second], joined=False))
    assert [batch.inputs for batch in apart] == [[[p] for p in [*first, *second]]]
    monkeypatch.setattr(solve, "BYTES", 1)
    assert [batch.inputs for batch in batches([*first, *second], joined=True)] == [[first], [second]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_without_a_value_is_named(bad):
    config, layers = problems(8, 16, 2, method="gptq", group_size=8)
    layers[1].target[3, 5] = bad
    with pytest.raises(NonFiniteError, match=r"layer layer-1"):
        config.method.twin(layers)


def test_a_hessian_that_cannot_be_factored_is_named():
    config, layers = problems(8, 16, method="gptq", group_size=8, damping=0.0)
    broken = dataclasses.replace(layers[0], name="broken", hessian=-layers[0].hessian)
    with pytest.raises(SolveError, match=r"layer broken: .*raise the damping"):
        config.method.twin([*layers, broken])


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "paper", "group_size": 20},
        {"method": "gptq-cd", "metric": "inputs", "group_size": 16, "rotation": "hadamard:16"},
        {"method": "gptq-cd", "metric": "loop", "group_size": 16, "metric_draws": 1, "beam": 4},
        {"preset": "fast", "group_size": 16, "inputs": "asymmetric"},
    ],
)
def test_a_run_on_a_device_gives_the_cores_layers(tiny, tokens, twins, monkeypatch, settings):
    run = run_of(tiny, tokens, QuantConfig.of(bits=3, **settings))
    found = run.solve()
    monkeypatch.undo()
    core = run.solve()
    assert list(found) == list(core)
    for name, layer in core.items():
        twin = found[name]
        assert "solved_on" not in layer.report
        assert set(twin.report) == {*layer.report, "solved_on"}
        assert (twin.codes == layer.codes).mean() > 0.9
        assert twin.report["proxy"] == pytest.approx(layer.report["proxy"], rel=0.05)


def test_what_has_no_twin_goes_to_the_core_and_the_run_says_so(tiny, tokens, twins):
    notes = Notes()
    run_of(tiny, tokens, QuantConfig.of(method="rtn", bits=3, group_size=16), progress=notes).solve()
    assert any("were solved on the CPU" in note for note in notes.notes)


@pytest.mark.gpu
@pytest.mark.parametrize("loop", [False, True])
def test_a_gpu_solves_as_the_core(loop):
    settings = {"method": "gptq-cd", "metric": "loop" if loop else "inputs", "group_size": 32, "bits": 3}
    config, layers = problems(96, 200, 2, loop=loop, **settings)
    there = [dataclasses.replace(p, device="cuda") for p in layers]
    for p, layer in zip(layers, config.method.quantize_all(there), strict=True):
        assert layer.report["solved_on"] == "cuda"
        assert loss(config, p, layer) == pytest.approx(loss(config, p, config.quantize(p)), rel=0.005)
