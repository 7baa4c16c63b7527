"""GPTQ with coordinate descent: closed-form updates that change neither the graph nor the file format."""

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
class MetricSettings(Settings):
    """Cost of an error of a layer.

    Parameters
    ----------
    kind : {"auto", "inputs", "loop"}
        Cost of an error. `inputs` takes the squared error of the layer's output. `loop` takes the effect on the model's
        output through the rest of the loop, from gradients of drawn labels. `auto` chooses loop if a backward pass
        works, else inputs, and reports the choice.
    draws : int
        Label draws for each prompt. They apply to metric loop.
    prompts : int, optional
        With metric loop, the maximum number of calibration prompts for gradients; all when absent.
    """

    kind: Literal["auto", "inputs", "loop"] = setting("auto")
    draws: int = setting(1, at_least=1, at_most=1 << 16)
    prompts: int | None = setting(None, at_least=1, at_most=1 << 31)


@QUANTIZERS.register("gptq-cd")
@dataclass(frozen=True)
class GPTQCD(Method):
    """GPTQ as a beam search, with searched scales and ordered columns, then coordinate descent on codes and scales.

    Parameters
    ----------
    metric : MetricSettings
        Cost of an error.
    damping : Damping
        Damping added to the diagonal of H.
    order : {"conditional", "diagonal", "natural"}
        Order of the sweep. `conditional` sorts by the cost of an error after the remaining columns compensate for it.
        `diagonal` sorts by diag H. `natural` keeps the order of the columns. No index is stored.
    signed_scales : bool
        Scales of symmetric grids may be negative, which moves the grid's extra code to the other side; else scales of
        symmetric grids are positive.
    beam : int
        Paths of codes that GPTQ keeps open in each row. With 1 it takes the nearest code in every column, as published.
    descent : int
        Maximum sweeps of one coordinate descent on the codes. The value 0 skips it.
    refit : bool
        Coordinate descent on the scales too; else scales stay as they were searched.
    rounds : int
        Maximum starts. A start runs GPTQ, later ones with the scales found so far, and then the descents. With 0 only
        GPTQ runs. Further starts reduce the loss by 1 to 5 %, each at the cost of the first.
    passes : int
        With metric loop, maximum passes in which each row is descended with all other rows fixed.

    Notes
    -----
    Minimises tr(D S D^T) over codes and scales, with S = H + diag(mu), in these stages:

    - Static scales of least weighted error. A column's weight is the cost of its error after later columns compensate.
    - GPTQ's sweep by falling conditional energy 1 / [(S_F)^-1]_jj, with F the remaining columns. Each row keeps the
      cheapest `beam` paths and extends each by its two nearest codes (M-algorithm: J. Anderson and S. Mohan, 1984).
    - Descent in turn on codes, c_j <- round((q_j - G_j / S_jj) / s_j), G = D S, and on scales,
      s_g <- s_g - (b G_g) / (b S_gg b), with b the code steps of group g.
    - Another sweep from these scales. Every change lowers the loss, and a row takes a new start only if it ends lower.
    With metric loop the loss is tr(A D S D^T). A couples the outputs, and both matrices use gradients of the end loss
    (`loopq.quantizers.loop_metric`). Rows too are solved one by one, each compensating those before.
    """

    rounds_as_published: ClassVar[bool] = False
    prefers_rotation: ClassVar[bool] = True
    has_twin: ClassVar[bool] = True
    prefers_uneven: ClassVar[bool] = True
    metric: MetricSettings = block(MetricSettings, "metric")
    damping: Damping = block(Damping, "damping", kind="diagonal")
    order: Literal["conditional", "diagonal", "natural"] = setting("conditional")
    signed_scales: bool = setting(True)
    beam: int = setting(16, at_least=1, at_most=4096)
    descent: int = setting(30, at_least=0)
    refit: bool = setting(True)
    rounds: int = setting(1, at_least=0)
    passes: int = setting(2, at_least=0)

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Maximum prompts (None: all) and label draws per prompt, with metric loop."""
        return (self.metric.prompts, self.metric.draws) if self.metric.kind == "loop" else None

    @property
    def work(self) -> tuple[float, float, float]:
        """An inverse and its pivots besides the factor; GPTQs, paths and descents per start, descents per pass."""
        passes = 6.0 * self.passes if self.metric.kind == "loop" else 0.0
        paths = 200.0 * self.beam * max(1, self.rounds) if self.beam > 1 else 0.0
        return 4.0, 8.0 + 25.0 * self.rounds + passes, paths

    @property
    def memory(self) -> tuple[int, int]:
        """Also the damped H; with metric loop also the combined H, and targets and errors in double precision."""
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
            problem.core(scale_search="mse", signed=self.signed_scales and problem.settings.symmetric),
            beam=self.beam,
            sweeps=self.descent,
            rounds=self.rounds,
            refit=self.refit,
        )

    def _plain(self, problem: Problem) -> dict[str, Any]:
        factor = problem.factor(self.damping, self.order)
        return native.gptq_cd(problem.target, factor, self._settings(problem), threads=problem.threads)

    def _coupled(self, problem: Problem) -> dict[str, Any]:
        factor, left, facts = sides(problem, self.damping, self.order, "conditional")
        solved = native.coupled(
            problem.target,
            factor,
            left,
            self._settings(problem),
            passes=self.passes,
            threads=problem.threads,
        )
        return solved | facts


def sides(
    problem: Problem,
    damping: Damping,
    columns: Literal["conditional", "diagonal", "natural"],
    rows: Literal["conditional", "natural"],
) -> tuple[native.DampedFactor, list[native.DampedFactor], dict[str, Any]]:
    """Return both sides of the loop metric in their orders: S damped and factored, A in blocks, and report entries.

    Raises
    ------
    SolveError
        No gradients were collected.
    """
    metric = problem.require_metric()
    combined = metric.combined(problem.require_observed())
    # The factor is not shared: other layers have other gradients.
    factor = replace(problem, hessian=combined, shared={}).factor(damping, columns)
    left = [
        native.DampedFactor(a, np.zeros(len(a)), order=rows, threads=problem.threads)
        for a in metric.floored(problem.target, combined)
    ]
    return factor, left, {"metric": "loop", "metric_gradients": metric.n_gradients}
