"""Measure calibration blindness: the trajectory loss of a layer solved from step 0 (Li, Sec. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import loopq._native as native
from loopq.analysis.diagnosis.weights import Matrix, Rounder
from loopq.calibrate.hessians import StepHessians
from loopq.errors import SolveError
from loopq.quantizers.base import Problem
from loopq.quantizers.config import LayerConfig

RTN, ONE, ALL = "rtn", "one_step", "all_steps"


def solved_losses(
    weight: Matrix,
    hessians: StepHessians,
    config: LayerConfig,
    damping: float,
    rounder: Rounder,
    threads: int = 0,
) -> dict[str, float] | None:
    """Round a layer, solve it from step 0 and from all steps, and measure the three losses over the trajectory.

    `hessians` are H_t of its input. All three variants use the grid of `config`.

    Returns
    -------
    dict or None
        tr(dW H dW^T) with H = sum_t H_t. The keys are "rtn", "one_step" and "all_steps". The result is None for a
        layer that runs at one step only, or that one of the Hessians cannot solve.
    """
    steps = list(hessians.steps)
    if len(steps) < 2:
        return None
    total = hessians.matrix(steps)
    gptq = LayerConfig.of(
        method="gptq",
        scale_search="max",
        bits=config.grid.bits,
        group_size=config.grid.group_size,
        damping=damping,
    )

    def loss(other: Matrix) -> float:
        return float(native.proxy(np.ascontiguousarray(other - weight), None, total, threads))

    def solve(h: Any) -> Matrix:
        return gptq.quantize(Problem("", weight, h, config.grid, threads=threads)).dequantize()

    try:
        losses = {ONE: loss(solve(hessians.matrix(steps[:1]))), ALL: loss(solve(total))}
    except SolveError:
        return None
    return {RTN: loss(rounder(weight, config))} | losses


def model_ratio(losses: Sequence[Mapping[str, float] | None], top: str, bottom: str) -> float | None:
    """Geometric mean over layers of the ratio of two losses. None where no layer has both above 0."""
    logs = [np.log(x[top] / x[bottom]) for x in losses if x and x[top] > 0 and x[bottom] > 0]
    return float(np.exp(np.mean(logs))) if logs else None
