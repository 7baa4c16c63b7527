"""The methods of the table, each by name, with the bits that it is measured at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.next import fit
from benches.next.corrections import STATE, Corrections, blank
from benches.next.methods import left_of
from benches.next.subject import Subject, bytes_of, weights_of
from loopq.quantizers.base import Problem
from loopq.run.allocate import Allocate
from loopq.run.engine import Layers

#: Columns of a scale on all grids: 4.125, 3.125 and 2.125 bits a weight.
GROUP = 128
#: Share of the bytes that corrections may take.
SHARE = 0.01

Weights = dict[str, NDArray[np.float32]]


class Bench:
    """One model and draw: layers of preset best, solved once a grid, and every method beside them."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.system = subject.system
        self._best: dict[int, tuple[Layers, Weights]] = {}
        self._others: dict[float, Subject] = {}

    def best(self, bits: int) -> tuple[Layers, Weights]:
        """Layers and weights of preset best."""
        if bits not in self._best:
            layers = self.subject.solve(f"best {bits}", bits, GROUP)
            self._best[bits] = layers, weights_of(layers)
        return self._best[bits]

    def with_random_tokens(self, share: float) -> Subject:
        """The same model, calibrated on a text with so many random tokens in it."""
        if share not in self._others:
            self._others[share] = dataclasses.replace(self.subject, share=share, seconds={})
        return self._others[share]

    def result(self, method: str, bits: int) -> dict[str, Any]:
        """Bytes, CPU seconds, KL and agreement of one method."""
        make, _ = METHODS[method]
        if make in FROM_BEST:
            self.best(bits)
        with self.subject.timed(method):
            layers, corrections = make(self, bits)
        if method == "best":
            self.subject.seconds[method] = self.subject.seconds[f"best {bits}"]
        weights = weights_of(layers)
        stored = None if corrections is None else corrections.stored()
        return {
            "n_bytes": bytes_of(layers) + (stored.n_bytes if stored else 0),
            "n_weights": sum(int(w.size) for w in weights.values()),
            "seconds": self.subject.seconds[method],
            "metric_seconds": self.subject.seconds["metric"],
        } | self.subject.measure(weights, stored)

    def trained(self, bits: int, names: list[str], shared: bool) -> tuple[Layers, Corrections]:
        """Gains and biases at some places, by gradient."""
        layers, weights = self.best(bits)
        model = self.subject.model
        prompts = (model.calibration, model.tuning_held_out)
        start = blank(self.system, model.calibration, names, shared)
        return layers, fit.trained(self.system, weights, prompts, start)


Made = tuple[Layers, Corrections | None]


def best(bench: Bench, bits: int) -> Made:
    """Preset best with one path of codes."""
    return bench.best(bits)[0], None


def searched(bench: Bench, bits: int) -> Made:
    """Preset best as it is: GPTQ with several paths of codes open."""
    return bench.subject.solve("beam", bits, GROUP, beam=None), None


def finer(bench: Bench, bits: int) -> Made:
    """Preset best with twice the scales: what bytes buy without a new method."""
    return bench.subject.solve("finer", bits, GROUP // 2), None


def mixed(bench: Bench, bits: int) -> Made:
    """Bits and group size of each layer by its ablation, within the bytes of preset best."""
    budget = bytes_of(bench.best(bits)[0])
    return bench.subject.solve("mixed", bits, GROUP, allocate=Allocate(budget=budget)), None


def state_closed(bench: Bench, bits: int) -> Made:
    """Gain and bias of the state for each step, by regression."""
    layers, weights = bench.best(bits)
    return layers, fit.regressed(bench.system, weights, bench.subject.model.calibration, gains=True)


def state_bias(bench: Bench, bits: int) -> Made:
    """Bias of the state for each step, by the difference of means."""
    layers, weights = bench.best(bits)
    return layers, fit.regressed(bench.system, weights, bench.subject.model.calibration, gains=False)


def state_trained(bench: Bench, bits: int) -> Made:
    """The same by gradient."""
    return bench.trained(bits, [STATE], shared=False)


def layer_trained(bench: Bench, bits: int) -> Made:
    """Gain and bias for each step at the output of the layer that feeds the state most directly."""
    return bench.trained(bits, [bench_layer(bench)], shared=False)


def every_layer(bench: Bench, bits: int) -> Made:
    """One gain and bias for all steps at every layer's output, by gradient: no step is known."""
    return bench.trained(bits, list(bench.best(bits)[1]), shared=True)


def every_step(bench: Bench, bits: int) -> Made:
    """A gain and bias for each step at every layer's output, by gradient: beyond the bytes, the limit of the idea."""
    return bench.trained(bits, list(bench.best(bits)[1]), shared=False)


def low_rank(bench: Bench, bits: int) -> Made:
    """U diag(a_t) V^T at the same layer, from a decomposition of its error in the loop metric, then by gradient."""
    layers, weights = bench.best(bits)
    subject, name = bench.subject, bench_layer(bench)
    task = next(t for t in subject.run.tasks if t.name == name)
    rows, columns = task.parameter.out_features, task.parameter.in_features
    steps = task.parameter.invocations
    rank = max(1, int(SHARE * bytes_of(layers)) // (rows + columns + 4 + 2 * steps))
    weight = subject.run.weights.oriented(task.parameter)
    hessian = subject.hessian(task)
    metric = subject.run.metrics[task.metric_key]
    assert metric is not None
    right = metric.combined(hessian)
    right = right + np.diag(0.01 * np.diag(right))
    problem = Problem(name, weight, hessian, task.config.grid, metric=metric)
    error = layers[name].dequantize().astype(np.float64) - weight
    start = fit.low_rank(name, error, (left_of(problem, right), right), rank, steps)
    model = subject.model
    return layers, fit.trained(bench.system, weights, (model.calibration, model.tuning_held_out), start)


def bench_layer(bench: Bench) -> str:
    """The exposed layer where there is one, else the last of the loop that writes to the state."""
    tasks = bench.subject.run.tasks
    exposed = [t.name for t in tasks if t.parameter.exposed]
    return (exposed or [t.name for t in tasks if t.parameter.role == "mlp"])[-1]


def coded(method: str, **settings: Any) -> Callable[[Bench, int], Made]:
    """Another method in the place of `gptq-cd`: the trellis, or a code of `benches.next.methods`."""

    def make(bench: Bench, bits: int) -> Made:
        return bench.subject.solve(method, bits, GROUP, method=method, **settings), None

    return make


def random_tokens(share: float) -> Callable[[Bench, int], Made]:
    """Preset best on a calibration text in which so many tokens are replaced by random ones."""

    def make(bench: Bench, bits: int) -> Made:
        return bench.with_random_tokens(share).solve("random tokens", bits, GROUP), None

    return make


#: What starts from the layers of preset best, or from their bytes: these are made outside its time.
FROM_BEST = (
    mixed,
    state_bias,
    state_closed,
    state_trained,
    layer_trained,
    every_layer,
    every_step,
    low_rank,
)
METHODS: dict[str, tuple[Callable[[Bench, int], Made], tuple[int, ...]]] = {
    "best": (best, (4, 3, 2)),
    "best, beam search": (searched, (4, 3, 2)),
    "trellis": (coded("trellis"), (4, 3, 2)),
    "trellis, 8 bits": (coded("trellis", state_bits=8), (3, 2)),
    "trellis, 12 bits": (coded("trellis", state_bits=12), (3, 2)),
    "E8 table": (coded("vectors", passes=0), (2,)),
    "D4 table": (coded("vectors", factor=1.25, passes=0), (3,)),
    "uniform grid, same solver": (coded("levels", passes=0), (3, 2)),
    "best, damped shift": (coded("gptq-cd-shift", beam=1), (3, 2)),
    "best, 5 % random tokens": (random_tokens(0.05), (4, 3, 2)),
    "best, group 64": (finer, (4, 3, 2)),
    "mixed bits": (mixed, (3,)),
    "state bias, closed form": (state_bias, (4, 3)),
    "state, closed form": (state_closed, (4, 3)),
    "state, gradient": (state_trained, (4, 3)),
    "one layer, gradient": (layer_trained, (4, 3)),
    "low rank, gradient": (low_rank, (4, 3)),
    "every layer, no step": (every_layer, (4, 3)),
    "every layer and step": (every_step, (4, 3)),
}
