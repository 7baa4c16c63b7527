"""Inputs of the full-precision rollout for every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loopq.run import INPUTS, Inputs
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
