"""Inputs of the whole trajectory, with as many rows as one step has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import loopq._native as native
from loopq.calibrate.device import Sums
from loopq.calibrate.rollouts import Collection, run_rollouts
from loopq.errors import ConfigError
from loopq.run import INPUTS, Inputs
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan
from loopq.run.solving import solve
from loopq.run.source import Layers

if TYPE_CHECKING:
    from torch import Tensor


class EqualRows:
    """Hessians of a trajectory from the number of rows of a single step.

    Notes
    -----
    Every token position is used at one step only. Of N successive positions each goes to a different one of the N
    steps, in an order drawn from the run's seed. Therefore all steps together have as many rows as one step. All steps
    contribute equally (within one row), and no position counts twice. The result replaces a `HessianSet` with separate
    steps.
    """

    def __init__(self, job: Collection) -> None:
        self.job = job
        self._sums = {
            p.name: Sums(p.in_features, range(p.invocations), per_step=True, threads=job.execution.threads)
            for p in job.selection.distinct_inputs
        }
        self._invocations = {p.name: p.invocations for p in job.selection.distinct_inputs}
        self._position: dict[tuple[str, int], int] = {}
        for _ in run_rollouts(job, self._take):
            pass
        self._accumulators = {name: sums.finish() for name, sums in self._sums.items()}

    def accumulator(
        self, input_group: str, steps: Sequence[int], *, per_step: bool = True
    ) -> native.HessianAccumulator:
        """Return the finished accumulator of an input group. It always keeps the steps separate."""
        return self._accumulators[input_group]

    def _take(self, input_group: str, step: int, rows: Tensor) -> None:
        import torch  # lazy: loopq imports without torch

        first = self._position.get((input_group, step), 0)
        self._position[input_group, step] = first + rows.shape[0]
        mine = self.step_of(np.arange(first, first + rows.shape[0]), self._invocations[input_group]) == step
        self._sums[input_group].add(step, rows[torch.from_numpy(mine).to(rows.device)])

    def step_of(self, positions: np.ndarray, n_steps: int) -> np.ndarray:
        """Return the step at which each position is used, int64, same shape."""
        blocks = positions // n_steps
        out = np.empty(positions.shape, dtype=np.int64)
        for block in np.unique(blocks):
            order = np.random.default_rng([self.job.execution.seed, n_steps, int(block)]).permutation(n_steps)
            inside = blocks == block
            out[inside] = order[positions[inside] % n_steps]
        return out


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
