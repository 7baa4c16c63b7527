"""Asymmetric trajectory calibration: layers are solved one by one, each on the inputs of the quantized model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.device import Sums
from loopq.calibrate.rollouts import Collection, run_rollouts
from loopq.errors import CalibrationError, naming
from loopq.layers.layer import Dequantized, QuantizedLayer
from loopq.layers.shared import SharedParameter
from loopq.models.replace import Replaced, Weights, placed
from loopq.quantizers.base import Problem
from loopq.quantizers.config import quantize_all
from loopq.quantizers.task import Task
from loopq.run import INPUTS, Inputs
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan, alike, steps_apart
from loopq.run.solver import account, loss_of, relative_error, save_layer, saved_layer
from loopq.run.solving import solve, solve_parts
from loopq.run.source import Layers
from loopq.run.step_weights import WeightedHessian, relative, step_weights
from loopq.settings.declare import setting
from loopq.storage.model_files import is_streamed
from loopq.terminal.progress import Silent

if TYPE_CHECKING:
    from torch import Tensor


@INPUTS.register("asymmetric")
@dataclass(frozen=True)
class AsymmetricInputs(Inputs):
    """Layer by layer, a rollout in which the layers before are quantized, against full-precision outputs.

    Parameters
    ----------
    alpha : float
        Share of the shift. With 0 the target is the weight itself, with 1 the target of least squares.
    sweeps : int
        Sweeps through all layers. From the second on, a layer is collected with all others at the codes of the previous
        sweep.

    Notes
    -----
    X_t comes from the full-precision rollout and X^_t from one in which the layers before are quantized. Then

        sum_t ||W X_t^T - W^ X^_t^T||^2 = const + tr((W^ - W*) S^ (W^ - W*)^T),
        S^ = sum_t X^_t^T X^_t,  W* = W (I + alpha C (S^ + diag(mu))^-1),  C = sum_t (X_t - X^_t)^T X^_t.

    Therefore any solver works, with W* for W and S^ for H. Step weights multiply both sums and come from the
    full-precision rollout. The solved layer is at full precision while its inputs are collected. Its own effect on its
    input through the loop is not included.

    Experts come first, from the inputs of the full-precision rollout. A quantized model may send other tokens to them,
    so their rows have no pairs.
    """

    pairs: ClassVar[bool] = True
    alpha: float = setting(1.0, at_least=0.0, at_most=1.0)
    sweeps: int = setting(1, at_least=1, at_most=100)

    def n_runs(self, n_passes: int, n_inputs: int) -> int:
        """Two runs for each distinct input and sweep."""
        return 2 * n_inputs * self.sweeps


@solve.register
def _(inputs: AsymmetricInputs, plan: Plan, source: ModelSource) -> Layers:
    """Solve all layers; return them by parameter name, in the order of the tasks."""
    _collect_metrics(plan, source)
    journal, progress = source.journal(plan, "layers"), source.execution.progress
    experts = [t for t in plan.tasks if t.parameter.routed_in]
    others = [t for t in plan.tasks if not t.parameter.routed_in]
    done = solve_parts(plan, source, experts) if experts else {}
    progress.start("solve", inputs.sweeps * len(others), "layers")
    for sweep in range(inputs.sweeps):
        for group in alike(others):
            part = f"sweep-{sweep}/"
            saved = {t.name: saved_layer(journal, t.name, part) for t in group}
            solved = {name: layer for name, layer in saved.items() if layer is not None}
            if len(solved) < len(group):
                solved = _GroupSolver(source, inputs, sweep).solve(group, done)
                solved = {name: save_layer(journal, layer, part) for name, layer in solved.items()}
            done.update(solved)
            progress.advance(len(group))
    progress.stop()
    return {t.name: done[t.name] for t in plan.tasks}


def _collect_metrics(plan: Plan, source: ModelSource) -> None:
    """Collect the loop metrics of layers that are solved one by one. Their Hessians come from separate passes."""
    missing = [t for t in plan.tasks if t.gradients and t.metric_key not in source.metrics]
    if not missing:
        return
    with contextlib.closing(source.parts(plan, missing)) as parts:
        for tasks, _, metrics in parts:
            source.metrics.update({t.metric_key: metrics[t.metric_key] for t in tasks})


@dataclass
class _GroupSolver:
    """The layers that read one input, in one sweep."""

    source: ModelSource
    settings: AsymmetricInputs
    sweep: int
    shared: dict[Any, Any] = field(default_factory=dict)

    def solve(self, tasks: Sequence[Task], done: Layers) -> Layers:
        """Collect the paired inputs and solve every layer of the group."""
        source = self.source
        weights = {t.name: source.weights.oriented(t.parameter) for t in tasks}
        input_group = tasks[0].input_group
        if input_group is None:
            return {t.name: self._rounded(t, weights[t.name]) for t in tasks}
        others = Dequantized({n: layer for n, layer in done.items() if n not in weights})
        current = others if is_streamed(source.job.system.model) else dict(others)
        paired = collect_pairs(source.job, [input_group], current, per_step=steps_apart(tasks))[input_group]
        solved = [self._problem(t, weights[t.name], paired) for t in tasks]
        layers = quantize_all([(t.config, p) for t, p in zip(tasks, solved, strict=True)])
        return {
            t.name: self._reported(t, weights[t.name], p, layer)
            for t, p, layer in zip(tasks, solved, layers, strict=True)
        }

    def _rounded(self, task: Task, weight: NDArray[np.float32]) -> QuantizedLayer:
        threads = self.source.execution.threads
        problem = Problem(task.name, weight, None, task.config.grid, task.parameter.orientation, threads)
        layer = task.config.method.quantize(problem)
        report = account(task, layer, weight, None, threads)
        return layer.with_report(**report, rank=None, rank_threshold=None)

    def _problem(self, task: Task, weight: NDArray[np.float32], paired: PairedSums) -> Problem:
        """Return the problem of a layer, with the shifted target."""
        key = (task.steps, task.step_weights)
        if key not in self.shared:
            self.shared[key] = (*_weighted(task, paired), {})
        moments, _, cache = self.shared[key]
        problem = Problem(
            task.name,
            weight,
            moments.quantized,
            task.config.grid,
            task.parameter.orientation,
            self.source.execution.threads,
            cache,
            self.source.metrics.get(task.metric_key),
            self.source.device,
        )
        with naming(task.name):
            target = problem.factor(task.config.method.shift_damping).shift(
                weight, moments.cross, self.settings.alpha, threads=problem.threads
            )
        return replace(problem, target=target)

    def _reported(
        self, task: Task, weight: NDArray[np.float32], problem: Problem, layer: QuantizedLayer
    ) -> QuantizedLayer:
        moments, summed, _ = self.shared[task.steps, task.step_weights]
        target, threads = problem.target, problem.threads
        with naming(task.name):
            report = account(task, layer, weight, summed, threads) | {
                "inputs": self.settings.name,
                "alpha": self.settings.alpha,
                "sweep": self.sweep,
                "rank": None,
                "rank_threshold": None,
                "target_shift": relative_error(target, weight),
                "proxy_shifted": loss_of(target, layer.dequantize(), moments.quantized, threads),
            }
        return layer.with_report(**report)


def _weighted(task: Task, paired: PairedSums) -> tuple[Moments, WeightedHessian]:
    """Weight the steps by the full-precision rollout and add them."""
    reference = ReferenceSums(paired.sums, paired.dim)
    chosen, scaled, shares = relative(task.steps, step_weights(reference, task))
    moments = paired.of(chosen, scaled)
    return moments, WeightedHessian(moments.reference, {t: reference.n_rows(t) for t in task.steps}, shares)


@dataclass(frozen=True)
class PairedSums:
    """Second moments of the paired inputs of one input group.

    Parameters
    ----------
    sums : HessianAccumulator
        Sums of the rows (x, x^), 2d wide, per step or over all steps. The full-precision rollout gives x and the
        quantized one x^. Both have the same prompt, position, step and initial state.
    dim : int
        d.
    """

    sums: native.HessianAccumulator
    dim: int

    def of(self, steps: Sequence[int], weights: Sequence[float] | None = None) -> Moments:
        """Return the weighted sum over steps."""
        both = self.sums.matrix(list(steps), weights=weights)
        d = self.dim
        quantized = np.ascontiguousarray(both[d:, d:])
        return Moments(
            reference=np.ascontiguousarray(both[:d, :d]),
            quantized=quantized,
            cross=np.ascontiguousarray(both[:d, d:] - quantized),
        )


@dataclass(frozen=True)
class ReferenceSums:
    """H_t of the full-precision rollout, a part of the paired sums.

    Parameters
    ----------
    sums : HessianAccumulator
        As in `PairedSums`. It is shared, not copied.
    dim : int
        d.
    """

    sums: native.HessianAccumulator
    dim: int

    @property
    def per_step(self) -> bool:
        """Whether each step is kept separately."""
        return self.sums.per_step

    @property
    def steps(self) -> Sequence[int]:
        """Available steps."""
        return self.sums.steps

    def n_rows(self, step: int) -> int:
        """Rows of X_t."""
        return self.sums.n_rows(step)

    def diagonal(self, steps: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Diagonal of the sum over steps, shape (d,)."""
        return np.ascontiguousarray(self.sums.diagonal(steps)[: self.dim])

    def matrix(
        self, steps: Sequence[int] | None = None, *, weights: Sequence[float] | None = None
    ) -> NDArray[np.float64]:
        """Weighted sum over steps, shape (d, d)."""
        both = self.sums.matrix(steps, weights=weights)
        return np.ascontiguousarray(both[: self.dim, : self.dim], dtype=np.float64)


@dataclass(frozen=True)
class Moments:
    """Second moments over steps, float64, shape (d, d) each.

    Parameters
    ----------
    reference : ndarray
        H = sum_t X_t^T X_t.
    quantized : ndarray
        S^ = sum_t X^_t^T X^_t.
    cross : ndarray
        C = sum_t (X_t - X^_t)^T X^_t.
    """

    reference: NDArray[np.float64]
    quantized: NDArray[np.float64]
    cross: NDArray[np.float64]


def collect_pairs(
    job: Collection, input_groups: Sequence[str], weights: Weights, *, per_step: bool = True
) -> dict[str, PairedSums]:
    """Run every batch with the model's own weights and with others, and pair the layers' inputs.

    Parameters
    ----------
    input_groups : sequence of str
        Input groups to observe. Others are skipped.
    weights : mapping of str to ndarray, float32
        Changed weights of the second rollout (`loopq.models.replace.replaced`).
    per_step : bool
        Keep each step separate. The sum over all steps divides the memory by the number of steps.

    Notes
    -----
    The moments of (x, x^) hold X^T X, X^T X^ and X^^T X^ in one exact accumulator. Therefore the bits are the same
    at any thread count, as for all Hessians.
    """
    import torch  # lazy: loopq imports without torch

    parameters: Mapping[str, SharedParameter] = {p.name: p for p in job.selection.distinct_inputs}
    weights = placed(job.system, weights)
    sums = {
        name: Sums(
            2 * parameters[name].in_features,
            range(parameters[name].invocations),
            per_step=per_step,
            threads=job.execution.threads,
        )
        for name in input_groups
    }
    # A loop that ends by itself may reach its last step several times.
    first: dict[tuple[str, int], list[Tensor]] = {}

    def keep(input_group: str, step: int, rows: Tensor) -> None:
        first.setdefault((input_group, step), []).append(rows.float().clone())

    def pair(input_group: str, step: int, rows: Tensor) -> None:
        waiting = first.get((input_group, step)) or [rows[:0]]
        reference = waiting.pop(0)
        _check(input_group, step, reference, rows)
        sums[input_group].add(step, torch.cat([reference, rows.float()], dim=1))

    changed = Replaced(job.system, weights)
    there = replace(job, system=changed.system)
    # Closed here instead of by the collector: a stored traceback would keep the hooks on the model.
    with (
        contextlib.closing(run_rollouts(job, keep, only=input_groups, progress=Silent())) as plain,
        contextlib.closing(run_rollouts(there, pair, only=input_groups, progress=Silent())) as other,
    ):
        for _ in plain:
            with changed:
                next(other)
            for (input_group, step), waiting in first.items():
                for reference in waiting:
                    _check(input_group, step, reference, reference[:0])
            first.clear()
        # The last batch is done. One more request ends the stage.
        next(other, None)
    return {name: PairedSums(both.finish(), parameters[name].in_features) for name, both in sums.items()}


def _check(input_group: str, step: int, reference: Tensor, rows: Tensor) -> None:
    if reference.shape != rows.shape:
        raise CalibrationError(
            f"layer {input_group}, step {step}: {tuple(rows.shape)} rows in the quantized rollout, "
            f"{tuple(reference.shape)} in the full-precision one: the model's work depends on its values; "
            "calibrate with inputs of the full-precision rollout alone: --inputs open"
        )
