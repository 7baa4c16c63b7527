"""Inputs of the model as first quantized, for the original weights once more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from loopq.models.replace import Replaced
from loopq.run import INPUTS, Inputs
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan
from loopq.run.solving import solve, solve_parts
from loopq.run.source import Layers


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
