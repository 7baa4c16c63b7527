"""GPTQ with coordinate descent: what a closed form can do for a layer without a change of graph or file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import loopq._native as native
from loopq.checkpoint.layer import QuantizedLayer
from loopq.errors import OutOfMemoryError, SolveError
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.damping import Damping
from loopq.settings import Settings, block, setting


@dataclass(frozen=True)
class Metric(Settings):
    """What an error of a layer costs.

    Parameters
    ----------
    kind : {"auto", "inputs", "loop"}
        What an error costs. inputs: the squared error of the layer's output; loop: what the error does to the model's
        output through the rest of the loop, from gradients of drawn labels; auto: loop where gradients can be had for
        at most a few times the cost of the rollouts, else inputs, and the choice is reported.
    draws : int
        With metric loop: draws of labels for each prompt.
    prompts : int, optional
        With metric loop: most calibration prompts that gradients are taken on; half of them, at least 16, when absent.
    """

    kind: Literal["auto", "inputs", "loop"] = setting("auto")
    draws: int = setting(2, at_least=1)
    prompts: int | None = setting(None, at_least=1)


@QUANTIZERS.register("gptq-cd")
@dataclass(frozen=True)
class GPTQCD(Method):
    """GPTQ with searched scales, ordered columns, coordinate descent on the codes and refitted scales.

    Parameters
    ----------
    metric : Metric
        What an error costs.
    damping : Damping
        What is added to the diagonal of H.
    order : {"conditional", "diagonal", "natural"}
        Order of the sweep. conditional: by what an error costs when the columns that remain make up for it; diagonal:
        by diag H; natural: as the columns stand. No index is stored.
    scale_cost : {"conditional", "diagonal", "even", "largest"}
        How errors count in the search for scales. conditional: as they cost when the other columns make up for them;
        diagonal: when none does; even: all alike; largest: no search, the scale of the largest magnitude.
    signed_scales : bool
        Scales of symmetric grids may be negative, which turns the grid's extra code to the other side; else scales of
        symmetric grids are positive.
    descent : int
        Most sweeps of coordinate descent on the codes; 0 leaves it out.
    refit : bool
        Closed-form scales for the codes found, and a new sweep from them; else scales stay as they were searched.
    rounds : int
        Most rounds of descent, refit and new sweep.
    passes : int
        With metric loop: most passes of solving each row again with all others fixed.

    Notes
    -----
    Minimises tr(D S D^T) over codes and scales, S = H + diag(mu): static scales of least weighted error; columns in
    the order of falling conditional energy 1 / [(S_F)^-1]_jj, F the columns that remain; one greedy sweep; coordinate
    descent c_j <- round((q_j - G_j / S_jj) / s_j), G = D S, until no code changes; scales s = (B S B^T)^-1 B S w for
    the codes found; and again. What a stage gives is taken row by row, only where it lowers the damped loss.

    With metric loop the loss is tr(A D S D^T) with a matrix A between outputs and gradients of the end loss in both
    (`loopq.quantizers.loop_metric`): rows are solved one after the other too, each making up for those before.
    """

    name: ClassVar[str] = "gptq-cd"
    rounds_as_published: ClassVar[bool] = False
    metric: Metric = block(Metric, "metric")
    damping: Damping = block(Damping, "damping", kind="diagonal")
    order: Literal["conditional", "diagonal", "natural"] = setting("conditional")
    scale_cost: Literal["conditional", "diagonal", "even", "largest"] = setting("conditional")
    signed_scales: bool = setting(True, off="unsigned-scales")
    descent: int = setting(30, at_least=0)
    refit: bool = setting(True, off="no-refit")
    rounds: int = setting(8, at_least=0)
    passes: int = setting(1, at_least=0)

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Most prompts (None: a share), and label draws for each, with metric loop."""
        return (self.metric.prompts, self.metric.draws) if self.metric.kind == "loop" else None

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        problem.observed  # noqa: B018  # refuses a layer without activations
        try:
            result = self._coupled(problem) if self.metric.kind == "loop" else self._plain(problem)
        except (SolveError, OutOfMemoryError) as cause:
            raise type(cause)(f"layer {problem.name}: {cause}") from cause
        return problem.layer(result, self.name)

    def _settings(self, problem: Problem) -> native.GptqCdSettings:
        grid = problem.grid
        return native.GptqCdSettings(
            bits=grid.bits,
            group_size=grid.core_group_size,
            symmetric=grid.symmetric,
            signed=self.signed_scales and grid.symmetric,
            scale_dtype=grid.core_scale_dtype,
            cost=self.scale_cost,
            sweeps=self.descent,
            rounds=self.rounds,
            refit=self.refit,
        )

    def _plain(self, problem: Problem) -> dict[str, Any]:
        hessian = problem.observed

        def factored() -> native.DampedFactor:
            mu = self.damping.vector(hessian, problem.threads)
            return native.DampedFactor(hessian, mu, order=self.order, threads=problem.threads)

        factor = problem.once((self.name, self.damping, self.order), factored)
        return native.gptq_cd(problem.target, factor, self._settings(problem), threads=problem.threads)

    def _coupled(self, problem: Problem) -> dict[str, Any]:
        metric = problem.metric
        if metric is None:
            raise SolveError("metric 'loop' needs gradients through the loop, and none were collected")
        combined = metric.combined(problem.observed)
        mu = self.damping.vector(combined, problem.threads)
        factor = native.DampedFactor(combined, mu, order=self.order, threads=problem.threads)
        left = metric.factors(problem.target, combined, problem.threads)
        found = native.coupled(
            problem.target,
            factor,
            left,
            self._settings(problem),
            passes=self.passes,
            threads=problem.threads,
        )
        return found | {"metric": "loop", "metric_gradients": metric.n_gradients}
