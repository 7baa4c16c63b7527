"""Weighting and sum of the steps' Hessians for the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.hessians import StepHessians
from loopq.errors import ConfigError
from loopq.quantizers.task import Task
from loopq.settings.steps import StepWeights, weigher_of


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


def step_weights(hessians: StepHessians, task: Task) -> StepWeights | None:
    """Return the weights of a task's steps, or None for the plain sum.

    Raises
    ------
    ConfigError
        The weighting needs separate Hessians per step, but only their sum was collected.
    """
    weigher = weigher_of(task.step_weights)
    if weigher is None:
        return None
    if not hessians.per_step:
        raise ConfigError(
            f"layer {task.name}: step_weights {task.step_weights!r} need the Hessian of each step; only their sum was "
            "collected: collect again with each step apart"
        )
    return weigher(hessians, task.steps)


def weighted(hessians: StepHessians, task: Task, weights: StepWeights | None) -> WeightedHessian:
    """Return sum_t w_t H_t over a task's steps, up to a positive factor.

    Steps of equal weight are summed exactly. Equal weights and a single step therefore give the same bits as the plain
    sum.
    """
    chosen, scaled, shares = relative(task.steps, weights)
    matrix = np.asarray(hessians.matrix(chosen, weights=scaled), dtype=np.float64)
    return WeightedHessian(matrix, {t: hessians.n_rows(t) for t in task.steps}, shares)


def relative(
    steps: Sequence[int], weights: StepWeights | None
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
