"""GPTQ with coordinate descent: what a closed form can do for a layer without a change of graph or file format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

import loopq._native as native
from loopq.errors import naming
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.damping import Damping
from loopq.settings.declare import Settings, block, setting


@dataclass(frozen=True)
class Metric(Settings):
    """What an error of a layer costs.

    Parameters
    ----------
    kind : {"auto", "inputs", "loop"}
        What an error costs. inputs: the squared error of the layer's output; loop: what the error does to the model's
        output through the rest of the loop, from gradients of drawn labels; auto: loop where a backward pass
        works, else inputs, and the choice is reported.
    draws : int
        With metric loop: draws of labels for each prompt.
    prompts : int, optional
        With metric loop: most calibration prompts that gradients are taken on; all when absent.
    """

    kind: Literal["auto", "inputs", "loop"] = setting("auto")
    draws: int = setting(1, at_least=1)
    prompts: int | None = setting(None, at_least=1)


@QUANTIZERS.register("gptq-cd")
@dataclass(frozen=True)
class GPTQCD(Method):
    """GPTQ as a beam search, with searched scales and ordered columns, then coordinate descent on codes and scales.

    Parameters
    ----------
    metric : Metric
        What an error costs.
    damping : Damping
        What is added to the diagonal of H.
    order : {"conditional", "diagonal", "natural"}
        Order of the sweep. conditional: by what an error costs when the columns that remain make up for it; diagonal:
        by diag H; natural: as the columns stand. No index is stored.
    signed_scales : bool
        Scales of symmetric grids may be negative, which turns the grid's extra code to the other side; else scales of
        symmetric grids are positive.
    beam : int
        Paths of codes that GPTQ keeps open in each row; 1: the nearest code in every column, as published.
    descent : int
        Most sweeps of one coordinate descent on the codes; 0 leaves it out.
    refit : bool
        Coordinate descent on the scales too; else they stay as they were searched.
    rounds : int
        Most starts: GPTQ, and GPTQ again with the scales found so far, each followed by the descents. 0 leaves GPTQ
        alone; more than one gain 1 to 5 % of the loss, each at the cost of the first.
    passes : int
        With metric loop: most passes in which the descents go on in every row with all others fixed.

    Notes
    -----
    Minimises tr(D S D^T) over codes and scales, S = H + diag(mu): static scales of least weighted error, an error
    in a column weighted as it costs once the later columns have made up for it; columns in the order of falling
    conditional energy 1 / [(S_F)^-1]_jj, F the columns that remain; GPTQ's sweep with the cheapest `beam` paths
    open in each row, each going on with its two nearest codes (the M-algorithm: J. Anderson and S. Mohan, 1984);
    coordinate descent on the codes, c_j <- round((q_j - G_j / S_jj) / s_j), G = D S, and on the scales, s_g <- s_g
    - (b G_g) / (b S_gg b) with b the code steps of group g, in turn; and the sweep again from the scales found. The
    loss falls with every change, and a new start is taken row by row, only where it ends lower.

    With metric loop the loss is tr(A D S D^T) with a matrix A between outputs and gradients of the end loss in both
    (`loopq.quantizers.loop_metric`): rows are solved one after the other too, each making up for those before.
    """

    name: ClassVar[str] = "gptq-cd"
    rounds_as_published: ClassVar[bool] = False
    has_twin: ClassVar[bool] = True
    metric: Metric = block(Metric, "metric")
    damping: Damping = block(Damping, "damping", kind="diagonal")
    order: Literal["conditional", "diagonal", "natural"] = setting("conditional")
    signed_scales: bool = setting(True, off="unsigned-scales")
    beam: int = setting(16, at_least=1, at_most=4096)
    descent: int = setting(30, at_least=0)
    refit: bool = setting(True, off="no-refit")
    rounds: int = setting(1, at_least=0)
    passes: int = setting(2, at_least=0)

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Most prompts (None: all), and label draws for each, with metric loop."""
        return (self.metric.prompts, self.metric.draws) if self.metric.kind == "loop" else None

    @property
    def work(self) -> tuple[float, float, float]:
        """An inverse and its pivots beside the factor; a start is some GPTQs, paths and descents, a pass descents."""
        passes = 6.0 * self.passes if self.metric.kind == "loop" else 0.0
        paths = 200.0 * self.beam * max(1, self.rounds) if self.beam > 1 else 0.0
        return 4.0, 8.0 + 25.0 * self.rounds + passes, paths

    @property
    def memory(self) -> tuple[int, int]:
        """The damped H besides; with metric loop the combined one, targets and errors in double precision."""
        return (4, 7) if self.metric.kind == "loop" else (3, 3)

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        problem.require_observed()
        with naming(problem.name):
            result = self._coupled(problem) if self.metric.kind == "loop" else self._plain(problem)
        return problem.layer(result, self.name)

    def twin(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        """Solve layers on their device."""
        from loopq.quantizers.twin.solve import GptqCd  # lazy: loopq imports without torch

        loop = self.metric.kind == "loop"
        return GptqCd(
            self.damping,
            self.order,
            signed=self.signed_scales,
            n_paths=self.beam,
            sweeps=self.descent,
            rounds=self.rounds,
            refit=self.refit,
            passes=self.passes if loop else None,
        ).solve(problems)

    def _settings(self, problem: Problem) -> native.GptqCdSettings:
        return native.GptqCdSettings(
            problem.core(scale_search="mse", signed=self.signed_scales and problem.grid.symmetric),
            beam=self.beam,
            sweeps=self.descent,
            rounds=self.rounds,
            refit=self.refit,
        )

    def _plain(self, problem: Problem) -> dict[str, Any]:
        factor = problem.factor(self.damping, self.order)
        return native.gptq_cd(problem.target, factor, self._settings(problem), threads=problem.threads)

    def _coupled(self, problem: Problem) -> dict[str, Any]:
        factor, left, told = sides(problem, self.damping, self.order, "conditional")
        found = native.coupled(
            problem.target,
            factor,
            left,
            self._settings(problem),
            passes=self.passes,
            threads=problem.threads,
        )
        return found | told


def sides(
    problem: Problem,
    damping: Damping,
    columns: Literal["conditional", "diagonal", "natural"],
    rows: Literal["conditional", "natural"],
) -> tuple[native.DampedFactor, list[native.DampedFactor], dict[str, Any]]:
    """Both sides of the loop metric, each in its order: S damped and factored, A in blocks, and what the report says.

    Raises
    ------
    SolveError
        No gradients were collected.
    """
    metric = problem.require_metric()
    combined = metric.combined(problem.require_observed())
    # Of this layer alone: no other one has its gradients.
    factor = replace(problem, hessian=combined, shared={}).factor(damping, columns)
    left = [
        native.DampedFactor(a, np.zeros(len(a)), order=rows, threads=problem.threads)
        for a in metric.floored(problem.target, combined)
    ]
    return factor, left, {"metric": "loop", "metric_gradients": metric.n_gradients}
