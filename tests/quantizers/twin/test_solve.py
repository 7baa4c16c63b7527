"""Which layers run together on a device, and the product's way through the twin."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import loopq.quantizers.base as base
import loopq.run.solver as solver
from loopq.errors import NonFiniteError, OutOfMemoryError, SolveError
from loopq.quantizers.config import Override
from loopq.quantizers.twin import solve
from loopq.quantizers.twin.solve import batches
from loopq.run.config import QuantConfig
from loopq.terminal.progress import Silent
from tests.support.accelerator import DEVICE, accelerator
from tests.support.runs import run_of
from tests.support.twins import loss, problems


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
    groups = list(batches([*first, *other, *second], joined=True))
    assert [batch.inputs for batch in groups] == [[first, second], [other]]
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
        pytest.param(
            {"method": "gptq-cd", "metric": "loop", "group_size": 16, "metric_draws": 1, "beam": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param({"preset": "fast", "group_size": 16, "inputs": "asymmetric"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_gives_the_cores_layers(tiny, tokens, monkeypatch, settings):
    run = run_of(tiny, tokens, QuantConfig.of(bits=3, **settings))
    core = run.solve()
    for module in (base, solver):
        monkeypatch.setattr(module, "has_twins", lambda device: True)
    # Some layers run together, but not all.
    monkeypatch.setattr(solver, "ROWS_TOGETHER", 150)
    result = run.solve()
    assert list(result) == list(core)
    for name, layer in core.items():
        twin = result[name]
        assert "solved_on" not in layer.report
        assert set(twin.report) == {*layer.report, "solved_on"}
        assert (twin.codes == layer.codes).mean() > 0.95
        assert twin.report["proxy"] == pytest.approx(layer.report["proxy"], rel=0.02)


@pytest.mark.parametrize("loop", [False, True])
def test_no_tensor_of_another_device_comes_in_between(loop):
    settings = {"metric": "loop" if loop else "inputs", "group_size": 8, "beam": 2, "rounds": 1, "passes": 1}
    config, layers = problems(12, 16, 2, loop=loop, block=8, method="gptq-cd", bits=3, **settings)
    with accelerator():
        layers_there = config.method.quantize_all([dataclasses.replace(p, device=DEVICE) for p in layers])
    for p, layer in zip(layers, layers_there, strict=True):
        assert layer.report["solved_on"] == DEVICE
        assert (layer.codes == config.quantize(p).codes).mean() > 0.95


def test_what_has_no_twin_goes_to_the_core_and_the_run_says_so(tiny, tokens):
    notes = Notes()
    override = Override("*adapter*", {"method": "rtn"})
    config = QuantConfig.of(preset="paper", group_size=16, overrides=(override,))
    run = run_of(tiny, tokens, config, progress=notes)
    with accelerator():
        tiny.model.to(DEVICE)
        result = run.solve()
    where = {name: layer.report["solved_on"] for name, layer in result.items()}
    assert [name for name in where if where[name] == "cpu"] == [name for name in where if "adapter" in name]
    assert any(f"1 of {len(where)} layers were solved on the CPU" in note for note in notes.notes)


@pytest.mark.gpu
@pytest.mark.parametrize("loop", [False, True])
def test_a_gpu_solves_as_the_core(loop):
    settings = {"method": "gptq-cd", "metric": "loop" if loop else "inputs", "group_size": 32, "bits": 3}
    config, layers = problems(96, 200, 2, loop=loop, **settings)
    there = [dataclasses.replace(p, device="cuda") for p in layers]
    for p, layer in zip(layers, config.method.quantize_all(there), strict=True):
        assert layer.report["solved_on"] == "cuda"
        assert loss(config, p, layer) == pytest.approx(loss(config, p, config.quantize(p)), rel=0.005)


def test_want_of_memory_on_a_device_names_the_layers(monkeypatch):
    def run(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    config, layers = problems(8, 16, 2, method="gptq", group_size=8)
    monkeypatch.setattr(solve.Gptq, "run", run)
    with pytest.raises(
        OutOfMemoryError, match="layer layer-0 and 1 more: CUDA out of memory: end other programs"
    ):
        config.method.twin(layers)
