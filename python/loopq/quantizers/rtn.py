"""Round to nearest: the baseline without activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.layers.grid import ScaleSearch
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.settings.declare import setting


@QUANTIZERS.register("rtn")
@dataclass(frozen=True)
class RTN(Method):
    """Round every weight to the nearest point of its grid, half to even.

    Parameters
    ----------
    scale_search : {"max", "half-range", "mse"}
        Scale of a group. `max` gives the largest magnitude the highest code. `half-range` places it half the code range
        from zero. `mse` takes the scale of least squared error on a shrink grid.
    """

    needs_hessian: ClassVar[bool] = False
    scale_search: ScaleSearch = setting("mse")

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        return problem.layer(round_to_grid(problem, problem.target, self.scale_search), self.name)


def round_to_grid(problem: Problem, weight: NDArray[np.float32], scale_search: ScaleSearch) -> dict[str, Any]:
    """Round a weight of the problem's shape to its grid; return codes, scales and zeros."""
    return dict(native.rtn(weight, problem.core(scale_search=scale_search), threads=problem.threads))
