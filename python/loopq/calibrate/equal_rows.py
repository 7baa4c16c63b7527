"""A trajectory's Hessian at the row budget of one step, spread over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import loopq._native as native
from loopq.calibrate.device import Sums
from loopq.calibrate.rollouts import Collection, run_rollouts

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
        self._accumulators = {name: found.finish() for name, found in self._sums.items()}

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
