"""The full solver: what a closed form can do for a layer without a change of graph or file format."""

from __future__ import annotations

from typing import Any

import loopq._native as native
from loopq.checkpoint.layer import QuantizedLayer
from loopq.errors import SolveError
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.base import Problem, core_group_size, core_scale_dtype, layer_from
from loopq.quantizers.damping import damping_vector


class Full:
    """Minimise tr(D S D^T) over codes and scales, S = H + diag(mu).

    Notes
    -----
    Static scales of least weighted error, with either sign where the grid is symmetric; columns in the order of
    falling conditional energy 1 / [(S_F)^-1]_jj, F the columns that remain; one greedy sweep; coordinate descent
    c_j <- round((q_j - G_j / S_jj) / s_j), G = D S, until no code changes; scales s = (B S B^T)^-1 B S w for the
    codes found; and again. What a stage gives is taken row by row, only where it lowers the damped proxy.

    With `metric = "loop"` the loss is tr(A D S D^T) with a matrix A between outputs and gradients of the end loss
    in both (`loopq.quantizers.metric`): rows are solved one after the other too, each making up for those before.
    """

    needs_hessian = True

    def __call__(self, problem: Problem) -> QuantizedLayer:
        """Quantize the layer."""
        if problem.hessian is None:
            raise SolveError(
                f"layer {problem.name}: the full solver needs the layer's activations, and none were collected"
            )
        try:
            result = self._solve(problem)
        except SolveError as cause:
            raise SolveError(f"layer {problem.name}: {cause}") from cause
        return layer_from(problem, result, "full")

    def _solve(self, problem: Problem) -> dict[str, Any]:
        config, metric = problem.config, problem.metric
        settings = native.FullSettings(
            bits=config.bits,
            group_size=core_group_size(config),
            symmetric=config.symmetric,
            signed=config.signed_scales and config.symmetric,
            scale_dtype=core_scale_dtype(config),
            cost=config.scale_cost,
            sweeps=config.descent,
            rounds=config.rounds,
            refit=config.refit,
        )
        if config.metric == "inputs":
            return native.full(problem.target, self._prepared(problem), settings, threads=problem.threads)
        if metric is None:
            raise SolveError("metric 'loop' needs gradients through the loop, and none were collected")
        assert problem.hessian is not None
        combined = metric.combined(problem.hessian)
        mu = damping_vector(combined, config.damping_kind, config.damping, problem.threads)
        prepared = native.Prepared(combined, mu, order=config.order, threads=problem.threads)
        left = metric.prepared(problem.target, combined, problem.threads)
        found = native.coupled(
            problem.target, prepared, left, settings, passes=config.passes, threads=problem.threads
        )
        return found | {"metric": "loop", "metric_gradients": metric.n_gradients}

    def _prepared(self, problem: Problem) -> native.Prepared:
        assert problem.hessian is not None
        config = problem.config
        key = ("full", config.damping_kind, config.damping, config.order)
        found = problem.shared.get(key)
        if found is None:
            mu = damping_vector(problem.hessian, config.damping_kind, config.damping, problem.threads)
            found = native.Prepared(problem.hessian, mu, order=config.order, threads=problem.threads)
            problem.shared[key] = found
        made: native.Prepared = found
        return made


QUANTIZERS.register("full")(Full())
