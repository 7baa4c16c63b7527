"""GPTQ (paper, A3): columns rounded one by one, each error spread over the columns still to come."""

from __future__ import annotations

import numpy as np

import loopq._native as native
from loopq.checkpoint.layer import QuantizedLayer
from loopq.errors import SolveError
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.base import Problem, core_group_size, core_scale_dtype, layer_from
from loopq.quantizers.damping import damping_vector


class GPTQ:
    """Minimise tr(D H D^T) column by column, D = W^ - W, with H summed over the steps chosen.

    A Hessian that cannot be factored at the damping asked for is an error: damping is never raised and
    rounding never put in its place unasked.
    """

    needs_hessian = True

    def __call__(self, problem: Problem) -> QuantizedLayer:
        """Quantize the layer."""
        config = problem.config
        if problem.hessian is None:
            raise SolveError(
                f"layer {problem.name}: GPTQ needs the layer's activations, and none were collected"
            )
        hessian, damping = problem.hessian, config.damping
        if config.damping_kind != "mean":
            mu = damping_vector(hessian, config.damping_kind, damping, problem.threads)
            hessian, damping = hessian + np.diag(mu), 0.0
        try:
            result = native.gptq(
                problem.target,
                hessian,
                bits=config.bits,
                group_size=core_group_size(config),
                symmetric=config.symmetric,
                damping=damping,
                precision=config.precision,
                scale_dtype=core_scale_dtype(config),
                scales=config.scales,
                scale_search=config.scale_search,
                act_order=config.act_order,
                block_size=config.block_size,
                # The run's report has tr(W H W^T) of every method; here it would cost as much as the solve.
                energy=False,
                threads=problem.threads,
            )
        except SolveError as cause:
            raise SolveError(f"layer {problem.name}: {cause}") from cause
        return layer_from(problem, result, "gptq")


QUANTIZERS.register("gptq")(GPTQ())
