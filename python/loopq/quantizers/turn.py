"""Whether to rotate a layer's input: GPTQ on some of its rows, with the input as it is and rotated.

GPTQ's loss is a sum over columns of a pivot of S times the squared rounding error of the column. A rotation changes
both: it evens the pivots within a group, since their product stays, and it changes how far a group's largest weight
lies above the others. Which of them counts more depends on the layer, so both bases are tried.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import loopq._native as native
from loopq.errors import SolveError
from loopq.quantizers.base import Problem
from loopq.quantizers.damping import Damping

#: Rows of a trial, evenly spaced.
ROWS = 64
#: Highest loss over that of the plain input for which a layer is rotated.
WORTH = 1.0


def compared(damping: Damping, plain: Problem, turned: Problem) -> tuple[bool, dict[str, Any]]:
    """Return whether the rotated problem has the lower loss, and the ratio of both losses for the report.

    The ratio is None if nothing is lost in the plain basis, or the rotated problem cannot be solved.

    Parameters
    ----------
    damping : Damping
        Damping of H.
    plain, turned : Problem
        The layer with its input as it is and rotated.
    """
    if plain.hessian is None:
        return False, {}
    before = _loss(damping, plain)
    if before == 0:
        return False, {"rotated_loss": None}
    try:
        ratio = _loss(damping, turned) / before
    except SolveError:
        # Gradients are summed in single precision. In few layers a rotation gathers its errors in one column, where
        # they exceed the damping.
        return False, {"rotated_loss": None}
    return ratio <= WORTH, {"rotated_loss": ratio}


def _loss(damping: Damping, problem: Problem) -> float:
    hessian = problem.require_observed()
    if problem.metric is not None:
        hessian = problem.metric.combined(hessian)
    rows = np.ascontiguousarray(problem.target[:: -(-len(problem.target) // ROWS)])
    part = replace(problem, target=rows, hessian=hessian, shared={}, metric=None)
    factor = part.factor(damping)
    grid = part.core(scale_search="mse")
    result = native.gptq(rows, factor, grid, scales="static", threads=problem.threads)
    return float(result["proxy_damped"])
