"""Asymmetric trajectory calibration: layers one after the other, each on the inputs that it will really get."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.asymmetric import Moments, PairedSums, collect_pairs
from loopq.calibrate.collect import Collection
from loopq.checkpoint.files import RawTensor
from loopq.checkpoint.layer import QuantizedLayer
from loopq.checkpoint.model_files import model_tensors
from loopq.errors import ConfigError
from loopq.progress import Progress, Silent
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.base import Problem
from loopq.quantizers.damping import damping_vector
from loopq.quantizers.metric import LoopMetric
from loopq.quantizers.solve import LayerStore, Seen, Task, account, oriented, solve_rotated, step_weighting
from loopq.quantizers.weighting import needs_weight, relative


@dataclass
class Sequential:
    """Solve the layers of a loop in the order of their first call, against the outputs of full precision.

    Parameters
    ----------
    job : Collection
        Model, prompts, seed and selection.
    alpha : float
        Share of the shift: 0 takes the weight itself as target (closed-loop recollection, layer by layer), 1
        the target of least squares.
    sweeps : int
        Times through all layers. From the second on, a layer is collected with all others at the codes of the
        sweep before.
    threads : int
        Threads; 0 takes all cores. It changes no code.
    progress : Progress, optional
        Told of layers.
    metrics : mapping of str to LoopMetric
        Loop metrics of the layers that ask for one.
    store : LayerStore
        Where solved layers are kept, so that a killed run goes on.

    Notes
    -----
    With X_t from the full-precision rollout and X^_t from one in which the layers before are quantized,

        sum_t ||W X_t^T - W^ X^_t^T||^2 = const + tr((W^ - W*) S^ (W^ - W*)^T),
        S^ = sum_t X^_t^T X^_t,  W* = W (I + alpha C (S^ + diag(mu))^-1),  C = sum_t (X_t - X^_t)^T X^_t,

    so any solver does, given W* for W and S^ for H; step weights multiply both sums, and are taken from the
    full-precision rollout. The layer that is being solved is at full precision while
    its inputs are collected; what it will do to its own input through the loop is not seen.
    """

    job: Collection
    alpha: float = 1.0
    sweeps: int = 1
    threads: int = 0
    progress: Progress = field(default_factory=Silent)
    metrics: Mapping[str, LoopMetric] = field(default_factory=dict)
    store: LayerStore = field(default_factory=lambda: LayerStore(None, ""))

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha must lie in [0, 1]; got {self.alpha!r}")
        if self.sweeps < 1:
            raise ConfigError(f"sweeps must be at least 1; got {self.sweeps!r}")

    def run(self, tasks: Sequence[Task]) -> dict[str, QuantizedLayer]:
        """Solve all tasks; return the layers by parameter name, in the order of the tasks."""
        tensors, ties = model_tensors(self.job.system.model)
        stored = {t.parameter.name: tensors[ties.get(t.parameter.name, t.parameter.name)] for t in tasks}
        done: dict[str, QuantizedLayer] = {}
        groups = _groups(tasks)
        self.progress.start("solve", self.sweeps * len(tasks), "layers")
        for sweep in range(self.sweeps):
            for group in groups:
                part = f"-sweep-{sweep}"
                kept = {t.parameter.name: self.store.find(t.parameter.name, part) for t in group}
                solved = {name: layer for name, layer in kept.items() if layer is not None}
                if len(solved) < len(group):
                    solved = self._group(group, stored, done, sweep)
                    for name, layer in solved.items():
                        self.store.keep(name, layer, part)
                done.update(solved)
                self.progress.advance(len(group))
        self.progress.stop()
        return {t.parameter.name: done[t.parameter.name] for t in tasks}

    def _group(
        self,
        tasks: Sequence[Task],
        stored: Mapping[str, RawTensor],
        done: Mapping[str, QuantizedLayer],
        sweep: int,
    ) -> dict[str, QuantizedLayer]:
        weights = {t.parameter.name: oriented(stored[t.parameter.name], t.parameter) for t in tasks}
        leader = tasks[0].leader
        if leader is None:
            return {n: self._plain(t, weights[n]) for t in tasks if (n := t.parameter.name)}
        others = {name: layer for name, layer in done.items() if name not in weights}
        current = {name: layer.in_model_orientation() for name, layer in others.items()}
        paired = collect_pairs(self.job, [leader], current, threads=self.threads)[leader]
        out = {}
        shared: dict[Any, Any] = {}
        for task in tasks:
            key: Any = (task.steps, task.config.step_weights)
            if needs_weight(task.config.step_weights):
                key = task.parameter.name
            if key not in shared:
                shared[key] = (*self._weighed(task, paired, weights[task.parameter.name]), {})
            moments, seen, scratch = shared[key]
            out[task.parameter.name] = self._solve(
                task, weights[task.parameter.name], moments, seen, scratch, sweep
            )
        return out

    def _weighed(self, task: Task, paired: PairedSums, weight: NDArray[np.float32]) -> tuple[Moments, Seen]:
        """Weigh the steps by what the full-precision rollout shows, and add them."""
        metric = self.metrics.get(task.parameter.name)
        found = step_weighting(paired.reference(), task, lambda: weight, metric, self.threads)
        rows = {t: paired.sums.n_rows(t) for t in task.steps}
        if found is None:
            moments = paired.of(task.steps)
            return moments, Seen(moments.reference, rows, None)
        chosen, scaled = relative(task.steps, found)
        moments = paired.of(chosen, scaled)
        total = float(sum(found))
        return moments, Seen(moments.reference, rows, [float(w) / total for w in found])

    def _plain(self, task: Task, weight: NDArray[np.float32]) -> QuantizedLayer:
        parameter = task.parameter
        problem = Problem(parameter.name, weight, None, task.config, parameter.orientation, self.threads, {})
        layer = QUANTIZERS.get(task.config.method)(problem)
        facts = account(task, layer, weight, None, self.threads)
        return layer.with_report(**facts, rank=None, rank_threshold=None)

    def _solve(
        self,
        task: Task,
        weight: NDArray[np.float32],
        moments: Moments,
        seen: Seen,
        scratch: dict[Any, Any],
        sweep: int,
    ) -> QuantizedLayer:
        config, parameter = task.config, task.parameter
        key = ("shift", config.damping_kind, config.damping)
        if key not in scratch:
            mu = damping_vector(moments.quantized, config.damping_kind, config.damping, self.threads)
            scratch[key] = native.Prepared(moments.quantized, mu, order="natural", threads=self.threads)
        goal = scratch[key].shift(weight, moments.cross, self.alpha, threads=self.threads)
        problem = Problem(
            parameter.name,
            weight,
            moments.quantized,
            config,
            parameter.orientation,
            self.threads,
            scratch,
            goal=goal,
            metric=self.metrics.get(parameter.name),
        )
        layer = solve_rotated(problem)
        values = layer.dequantize()
        shift = float(np.linalg.norm(goal - weight) / max(float(np.linalg.norm(weight)), 1e-30))
        report = account(task, layer, weight, seen, self.threads) | {
            "inputs": "asymmetric",
            "alpha": self.alpha,
            "sweep": sweep,
            "rank": None,
            "rank_threshold": None,
            "target_shift": shift,
            "proxy_shifted": native.proxy(goal, values, moments.quantized, threads=self.threads),
        }
        return layer.with_report(**report)


def _groups(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks that read the same input together, in order of first call; those without one alone."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.leader or task.parameter.name, []).append(task)
    return list(groups.values())


def recollected(
    job: Collection,
    tasks: Sequence[Task],
    layers: Mapping[str, QuantizedLayer],
    threads: int = 0,
    metrics: Mapping[str, LoopMetric] | None = None,
) -> dict[str, QuantizedLayer]:
    """Closed-loop recollection (paper, B8): H from the rollout of quantized layers, original weights quantized anew.

    Parameters
    ----------
    job : Collection
        Model, prompts, seed and selection.
    tasks : sequence of Task
        What is asked for each layer.
    layers : mapping of str to QuantizedLayer
        Layers quantized open loop.
    threads : int
        Threads; 0 takes all cores.
    metrics : mapping of str to LoopMetric, optional
        Loop metrics of the layers that ask for one.
    """
    from loopq.calibrate.collect import HessianSet
    from loopq.quantizers.solve import Solver
    from loopq.systems.replace import replaced

    tensors, ties = model_tensors(job.system.model)
    steps: dict[str, set[int]] = {}
    for task in tasks:
        if task.leader:
            steps.setdefault(task.leader, set()).update(task.steps)
    sums = HessianSet(job, {k: sorted(v) for k, v in steps.items()}, per_step=True, threads=threads)
    with replaced(job.system, {name: layer.in_model_orientation() for name, layer in layers.items()}):
        sums.run_pass(list(steps))
    solver = Solver(lambda p: tensors[ties.get(p.name, p.name)], sums, None, threads, metrics=metrics or {})
    return {n: layer.with_report(inputs="closed-loop") for n, layer in solver.run(tasks).items()}


def with_config(tasks: Sequence[Task], **changes: Any) -> list[Task]:
    """The tasks with other settings."""
    return [dataclasses.replace(t, config=dataclasses.replace(t.config, **changes)) for t in tasks]
