"""How the Hessians of the steps are weighted and added to the one that the solver sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.hessians import StepHessians
from loopq.errors import ConfigError, SolveError
from loopq.quantizers.base import Problem
from loopq.quantizers.loop_metric import LoopMetric
from loopq.quantizers.task import Task
from loopq.run.plan import rounding_like
from loopq.steps import parse_step_weights

BALANCE_ROUNDS = 200
MINIMAX_ROUNDS = 8
MINIMAX_RATE = 0.5

Weighting = list[float] | list[Fraction]
Solve = Callable[[NDArray[np.float64]], NDArray[np.float32]]


@dataclass(frozen=True)
class WeightedHessian:
    """H of one layer's input over the steps chosen.

    Parameters
    ----------
    matrix : ndarray, float64, shape (d, d)
        sum_t w_t H_t up to a positive factor.
    rows : dict of int to int
        Rows of each step.
    weights : list of float or None
        w_t over their sum; None where all rows count alike.
    """

    matrix: NDArray[np.float64]
    rows: dict[int, int]
    weights: list[float] | None


def needs_weight(task: Task) -> bool:
    """Whether a layer's step weights depend on its weight, not on its input alone."""
    return parse_step_weights(task.step_weights) in ("loss", "minimax")


def step_weights(
    hessians: StepHessians,
    task: Task,
    weight: Callable[[], NDArray[np.float32]],
    metric: LoopMetric | None = None,
    threads: int = 0,
) -> Weighting | None:
    """Return the weights of a task's steps as its settings ask for, or None where the plain sum is meant.

    Parameters
    ----------
    hessians : StepHessians
        Hessians of the task's input.
    task : Task
        Layer and its settings.
    weight : callable
        Gives the layer's weight, float32, outputs first.
    metric : LoopMetric, optional
        Loop metric of the layer.
    threads : int
        Threads; 0 takes all cores.

    Raises
    ------
    ConfigError
        The weighting needs each step's Hessian apart and only their sum was collected.
    """
    spec = parse_step_weights(task.step_weights)
    if spec == "sum":
        return None
    if not hessians.per_step:
        raise ConfigError(
            f"layer {task.name}: step_weights {task.step_weights!r} need the Hessian of each step; only their sum was "
            "collected: collect again with each step apart"
        )
    if isinstance(spec, Fraction):
        return alpha_weights(spec, len(task.steps))
    if spec == "trace":
        return trace_weights(hessians, task.steps)
    if spec == "balanced":
        return balanced_weights(hessians, task.steps)
    if spec == "validated":
        raise ConfigError(
            f"layer {task.name}: step_weights 'validated' are chosen for a whole run by `quantize`, which holds "
            "prompts out; they cannot stand in an override or go with a dump"
        )
    problem = Problem(task.name, weight(), None, task.config.grid, threads=threads, metric=metric)
    rounded = rounding_like(task.config).quantize(problem).dequantize()
    if spec == "loss":
        return loss_weights(hessians, task.steps, problem.target, rounded, threads)

    def solve(hessian: NDArray[np.float64]) -> NDArray[np.float32]:
        return task.config.method.quantize(replace(problem, hessian=hessian, shared={})).dequantize()

    return minimax_weights(hessians, task.steps, problem.target, rounded, solve, threads)


def weighted(hessians: StepHessians, task: Task, weights: Weighting | None) -> WeightedHessian:
    """Add the Hessians of a task's steps."""
    rows = {t: hessians.n_rows(t) for t in task.steps}
    if weights is None:
        return WeightedHessian(np.asarray(hessians.matrix(list(task.steps)), dtype=np.float64), rows, None)
    total = float(sum(weights))
    return WeightedHessian(combine(hessians, task.steps, weights), rows, [float(w) / total for w in weights])


def alpha_weights(alpha: Fraction, n_steps: int) -> list[Fraction]:
    """Weights of H = alpha H_0 + (1 - alpha) mean(H_1, ..., H_{N-1}), exact.

    alpha = 1/N weighs all steps alike, 0 leaves step 0 out, 1 leaves the others out.
    """
    if n_steps == 1:
        return [Fraction(1)]
    return [alpha] + [(1 - alpha) / (n_steps - 1)] * (n_steps - 1)


def trace_weights(hessians: StepHessians, steps: Sequence[int]) -> list[float]:
    """1 / tr H_t: no step counts for more than another, however large its activations."""
    return _inverse([hessians.trace(t) for t in steps], steps, "trace")


def balanced_weights(hessians: StepHessians, steps: Sequence[int]) -> list[float]:
    """Weights under which every step has the same share of the channels.

    Returns
    -------
    list of float
        w with sum_j w_t H_t,jj / S_jj equal for all t, S = sum_t w_t H_t.

    Notes
    -----
    Scaling the activations of one step, or of one channel in all steps, changes S by just that scaling and no
    step's share: a channel with massive activations cannot decide which step counts. A step with no activation
    gets weight 0. Found by fixed-point iteration, which is Sinkhorn's on the diagonals.
    """
    table = np.stack([hessians.diagonal([t]) for t in steps])
    live = table.sum(axis=1) > 0
    if not live.any():
        raise SolveError("step_weights 'balanced': every activation is zero at every step")
    table = table[live][:, table.sum(axis=0) > 0]
    table = table / table.sum(axis=0)
    w = 1.0 / table.sum(axis=1)
    for _ in range(BALANCE_ROUNDS):
        share = (table / (w @ table)).sum(axis=1)
        new = 1.0 / share
        new *= len(new) / new.sum()
        if np.allclose(new, w, rtol=1e-13, atol=0):
            break
        w = new
    out = np.zeros(len(live))
    out[live] = w
    return [float(v) for v in out]


def loss_weights(
    hessians: StepHessians,
    steps: Sequence[int],
    weight: NDArray[np.float32],
    rounded: NDArray[np.float32],
    threads: int = 0,
) -> list[float]:
    """1 / tau_t with tau_t = tr(D H_t D^T), D the error of plain rounding: a step counts by what is at stake."""
    losses = [native.proxy(weight, rounded, hessians.matrix([t]), threads=threads) for t in steps]
    return _inverse(losses, steps, "loss")


def minimax_weights(
    hessians: StepHessians,
    steps: Sequence[int],
    weight: NDArray[np.float32],
    rounded: NDArray[np.float32],
    solve: Solve,
    threads: int = 0,
) -> list[float]:
    """Weights that lower the worst step's loss relative to plain rounding, by multiplicative updates.

    Notes
    -----
    min_D max_t tr(D H_t D^T) / tau_t. Starting from 1 / tau_t, each round solves the layer and multiplies w_t
    by exp(eta (L_t / tau_t - mean) / mean). The weights of the round with the least worst loss are returned.
    """
    matrices = [hessians.matrix([t]) for t in steps]
    tau = np.array([native.proxy(weight, rounded, h, threads=threads) for h in matrices])
    w = np.array(_inverse([float(v) for v in tau], steps, "minimax"))
    live = tau > 0
    best, chosen = np.inf, w
    for _ in range(MINIMAX_ROUNDS):
        found = solve(combine(hessians, steps, [float(v) for v in w]))
        ratio = np.array([native.proxy(weight, found, h, threads=threads) for h in matrices])
        ratio = np.where(live, ratio / np.where(live, tau, 1.0), 0.0)
        if ratio.max() < best:
            best, chosen = float(ratio.max()), w
        mean = ratio[live].mean()
        w = w * np.exp(MINIMAX_RATE * np.where(live, ratio - mean, 0.0) / mean)
    return [float(v) for v in chosen]


def _inverse(values: Sequence[float], steps: Sequence[int], name: str) -> list[float]:
    array = np.array(values)
    if not (array > 0).any():
        raise SolveError(f"step_weights {name!r}: nothing is at stake at any of the steps {list(steps)}")
    # A step without activations adds nothing whatever its weight.
    out = np.where(array > 0, 1.0 / np.where(array > 0, array, 1.0), 0.0)
    return [float(v) for v in out / out.max()]


def combine(
    hessians: StepHessians, steps: Sequence[int], weights: Sequence[float] | Sequence[Fraction]
) -> NDArray[np.float64]:
    """Return sum_t w_t H_t up to a positive factor, float64, shape (d, d).

    Steps of equal weight are summed exactly, so that weights which say "all alike" or "this step alone" give the
    very bits of the plain sum.
    """
    chosen, scaled = relative(steps, weights)
    if scaled is None:
        return np.asarray(hessians.matrix(chosen), dtype=np.float64)
    return np.asarray(hessians.matrix(chosen, weights=scaled), dtype=np.float64)


def relative(
    steps: Sequence[int], weights: Sequence[float] | Sequence[Fraction]
) -> tuple[list[int], list[float] | None]:
    """Steps of weight above 0, and their weights over the largest; None for these where all are alike."""
    values: list[Any] = list(weights)
    kept = [(t, w) for t, w in zip(steps, values, strict=True) if w != 0]
    if not kept:
        raise ConfigError(f"step_weights leave no step of {list(steps)}")
    chosen = [t for t, _ in kept]
    if len({w for _, w in kept}) == 1:
        return chosen, None
    largest = max(w for _, w in kept)
    return chosen, [float(w / largest) for _, w in kept]
