"""Weighting and sum of the steps' Hessians for the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.hessians import StepHessians
from loopq.errors import ConfigError, SolveError
from loopq.quantizers.task import Task
from loopq.settings.steps import parse_step_weights

BALANCE_ROUNDS = 200

Weighting = list[float] | list[Fraction]


@dataclass(frozen=True)
class WeightedHessian:
    """H of one layer's input over the chosen steps.

    Parameters
    ----------
    matrix : ndarray, float64, shape (d, d)
        Sum of w_t H_t over t. It is determined up to a positive factor.
    rows : dict of int to int
        Rows of each step.
    weights : list of float or None
        w_t over their sum; None if all rows have equal weight.
    """

    matrix: NDArray[np.float64]
    rows: dict[int, int]
    weights: list[float] | None


def step_weights(hessians: StepHessians, task: Task) -> Weighting | None:
    """Return the weights of a task's steps, or None for the plain sum.

    Raises
    ------
    ConfigError
        The weighting needs separate Hessians per step, but only their sum was collected.
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
    return balanced_weights(hessians, task.steps)


def weighted(hessians: StepHessians, task: Task, weights: Weighting | None) -> WeightedHessian:
    """Return sum_t w_t H_t over a task's steps, up to a positive factor.

    Steps of equal weight are summed exactly. Equal weights and a single step therefore give the same bits as the plain
    sum.
    """
    chosen, scaled, shares = relative(task.steps, weights)
    matrix = np.asarray(hessians.matrix(chosen, weights=scaled), dtype=np.float64)
    return WeightedHessian(matrix, {t: hessians.n_rows(t) for t in task.steps}, shares)


def alpha_weights(alpha: Fraction, n_steps: int) -> list[Fraction]:
    """Exact weights of H = alpha H_0 + (1 - alpha) mean(H_1, ..., H_{N-1}).

    alpha = 1/N gives all steps equal weight. 0 omits step 0, and 1 omits the others.
    """
    if n_steps == 1:
        return [Fraction(1)]
    return [alpha] + [(1 - alpha) / (n_steps - 1)] * (n_steps - 1)


def balanced_weights(hessians: StepHessians, steps: Sequence[int]) -> list[float]:
    """Weights that give every step the same share of the channels.

    Returns
    -------
    list of float
        w with sum_j w_t H_t,jj / S_jj equal for all t, S = sum_t w_t H_t.

    Notes
    -----
    Scaling the activations of one step, or of one channel in all steps, scales S accordingly and changes no step's
    share. Therefore a channel with massive activations cannot decide which step counts. A step without activation gets
    weight 0. The weights are found by fixed-point iteration, which is Sinkhorn's on the diagonals.
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


def relative(
    steps: Sequence[int], weights: Weighting | None
) -> tuple[list[int], list[float] | None, list[float] | None]:
    """Return steps of positive weight, their weights over the largest (None if equal), and all over their sum."""
    if weights is None:
        return list(steps), None, None
    values: list[Any] = list(weights)
    kept = [(t, w) for t, w in zip(steps, values, strict=True) if w != 0]
    if not kept:
        raise ConfigError(f"step_weights leave no step of {list(steps)}")
    total, largest = float(sum(values)), max(w for _, w in kept)
    scaled = None if len({w for _, w in kept}) == 1 else [float(w / largest) for _, w in kept]
    return [t for t, _ in kept], scaled, [float(w) / total for w in values]
