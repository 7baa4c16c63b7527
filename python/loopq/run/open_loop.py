"""Inputs of the full-precision rollout for every layer, and two variants for comparison."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from loopq.calibrate.equal_rows import EqualRows
from loopq.errors import ConfigError
from loopq.models.replace import Replaced
from loopq.run import INPUTS, Inputs
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan
from loopq.run.solving import solve, solve_parts
from loopq.run.source import Layers, Source


@INPUTS.register("open")
@dataclass(frozen=True)
class Open(Inputs):
    """The full-precision rollout."""

    runs_between: ClassVar[bool] = False


@solve.register
def _(inputs: Open, plan: Plan, source: Source) -> Layers:
    return solve_parts(plan, source, plan.tasks)


@INPUTS.register("closed-loop")
@dataclass(frozen=True)
class ClosedLoop(Inputs):
    """The rollout of the model as first quantized, for the original weights once more."""

    def n_runs(self, n_passes: int, n_inputs: int) -> int:
        """One additional run."""
        return max(1, n_passes) + 1


@solve.register
def _(inputs: ClosedLoop, plan: Plan, source: ModelSource) -> Layers:
    """Solve open loop, collect again, solve again."""
    layers = solve_parts(plan, source, plan.tasks)
    weights = {name: layer.in_model_orientation() for name, layer in layers.items()}
    with Replaced(source.job.system, weights) as other:
        job = dataclasses.replace(source.job, system=other)
        sums = dataclasses.replace(source, job=job).all_steps(plan)
    again = source.solver(plan, sums, source.metrics).run(plan.tasks)
    return {name: layer.with_report(inputs=inputs.name) for name, layer in again.items()}


@INPUTS.register("equal-rows")
@dataclass(frozen=True)
class EqualBudget(Inputs):
    """As many rows over all steps together as one step has, a control for the number of rows."""

    takes_gradients: ClassVar[bool] = False

    def n_runs(self, n_passes: int, n_inputs: int) -> int:
        """One run, with all Hessians in memory."""
        return 1


@solve.register
def _(inputs: EqualBudget, plan: Plan, source: ModelSource) -> Layers:
    if any(t.parameter.routed_in for t in plan.tasks):
        raise ConfigError(
            "inputs 'equal-rows' count a token at one step only, and experts have other tokens at each step: take "
            "inputs 'open', or --exclude the experts"
        )
    if any(t.gradients for t in plan.tasks):
        raise ConfigError(
            "inputs 'equal-rows' are a control for the paper's method: they go with metric 'inputs'"
        )
    return source.solver(plan, EqualRows(source.job), source.metrics).run(plan.tasks)
