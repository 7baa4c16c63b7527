"""Round to nearest (paper, A1, A2, A5): the baseline that sees no activations."""

from __future__ import annotations

import loopq._native as native
from loopq.checkpoint.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.base import Problem, core_group_size, core_scale_dtype, layer_from


class RTN:
    """Round every weight to the nearest point of its group's grid, half to even."""

    needs_hessian = False

    def __call__(self, problem: Problem) -> QuantizedLayer:
        """Quantize the layer."""
        config = problem.config
        result = native.rtn(
            problem.target,
            bits=config.bits,
            group_size=core_group_size(config),
            symmetric=config.symmetric,
            scale_dtype=core_scale_dtype(config),
            scale_search=config.scale_search,
            threads=problem.threads,
        )
        return layer_from(problem, result, "rtn")


QUANTIZERS.register("rtn")(RTN())
