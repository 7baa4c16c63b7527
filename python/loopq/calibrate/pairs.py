"""Paired inputs of a layer: from the full-precision rollout and from a quantized one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.device import Sums
from loopq.calibrate.rollouts import Collection, run_rollouts
from loopq.errors import CalibrationError
from loopq.layers.shared import SharedParameter
from loopq.models.replace import Replaced, Weights, placed
from loopq.terminal.progress import Silent

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PairedSums:
    """Second moments of the paired inputs of one input group.

    Parameters
    ----------
    sums : HessianAccumulator
        Sums of the rows (x, x^), 2d wide, per step or over all steps. The full-precision rollout gives x and the
        quantized one x^. Both have the same prompt, position, step and initial state.
    dim : int
        d.
    """

    sums: native.HessianAccumulator
    dim: int

    def of(self, steps: Sequence[int], weights: Sequence[float] | None = None) -> Moments:
        """Return the weighted sum over steps."""
        chosen = list(steps)
        both = (
            self.sums.matrix(chosen) if weights is None else self.sums.matrix(chosen, weights=list(weights))
        )
        d = self.dim
        quantized = np.ascontiguousarray(both[d:, d:])
        return Moments(
            reference=np.ascontiguousarray(both[:d, :d]),
            quantized=quantized,
            cross=np.ascontiguousarray(both[:d, d:] - quantized),
        )

    def reference(self) -> ReferenceSums:
        """Return the sums of the full-precision rollout alone, step by step."""
        return ReferenceSums(self.sums, self.dim)


@dataclass(frozen=True)
class ReferenceSums:
    """H_t of the full-precision rollout, a part of the paired sums.

    Parameters
    ----------
    sums : HessianAccumulator
        As in `PairedSums`. It is shared, not copied.
    dim : int
        d.
    """

    sums: native.HessianAccumulator
    dim: int

    @property
    def per_step(self) -> bool:
        """Whether each step is kept separately."""
        return self.sums.per_step

    @property
    def steps(self) -> Sequence[int]:
        """Available steps."""
        return self.sums.steps

    def n_rows(self, step: int) -> int:
        """Rows of X_t."""
        return self.sums.n_rows(step)

    def trace(self, step: int | None = None) -> float:
        """tr H_t, or of the sum over all steps."""
        return float(self.diagonal(None if step is None else [step]).sum())

    def diagonal(self, steps: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Diagonal of the sum over steps, shape (d,)."""
        return np.ascontiguousarray(self.sums.diagonal(steps)[: self.dim])

    def matrix(
        self, steps: Sequence[int] | None = None, *, weights: Sequence[float] | None = None
    ) -> NDArray[np.float64]:
        """Weighted sum over steps, shape (d, d)."""
        both = self.sums.matrix(steps) if weights is None else self.sums.matrix(steps, weights=weights)
        return np.ascontiguousarray(both[: self.dim, : self.dim], dtype=np.float64)


@dataclass(frozen=True)
class Moments:
    """Second moments over steps, float64, shape (d, d) each.

    Parameters
    ----------
    reference : ndarray
        H = sum_t X_t^T X_t.
    quantized : ndarray
        S^ = sum_t X^_t^T X^_t.
    cross : ndarray
        C = sum_t (X_t - X^_t)^T X^_t.
    """

    reference: NDArray[np.float64]
    quantized: NDArray[np.float64]
    cross: NDArray[np.float64]


def collect_pairs(
    job: Collection, input_groups: Sequence[str], weights: Weights, *, per_step: bool = True
) -> dict[str, PairedSums]:
    """Run every batch with the model's own weights and with others, and pair the layers' inputs.

    Parameters
    ----------
    input_groups : sequence of str
        Input groups to observe. Others are skipped.
    weights : mapping of str to ndarray, float32
        Changed weights of the second rollout (`loopq.models.replace.replaced`).
    per_step : bool
        Keep each step separate. The sum over all steps divides the memory by the number of steps.

    Notes
    -----
    The moments of (x, x^) hold X^T X, X^T X^ and X^^T X^ in one exact accumulator. Therefore the bits are the same
    at any thread count, as for all Hessians.
    """
    import torch  # lazy: loopq imports without torch

    parameters: Mapping[str, SharedParameter] = {p.name: p for p in job.selection.distinct_inputs}
    weights = placed(job.system, weights)
    sums = {
        name: Sums(
            2 * parameters[name].in_features,
            range(parameters[name].invocations),
            per_step=per_step,
            threads=job.execution.threads,
        )
        for name in input_groups
    }
    first: dict[tuple[str, int], Tensor] = {}

    def keep(input_group: str, step: int, rows: Tensor) -> None:
        first[input_group, step] = rows.float().clone()

    def pair(input_group: str, step: int, rows: Tensor) -> None:
        reference = first.pop((input_group, step))
        _check(input_group, step, reference, rows)
        sums[input_group].add(step, torch.cat([reference, rows.float()], dim=1))

    changed = Replaced(job.system, weights)
    there = dataclasses.replace(job, system=changed.system)
    # Closed here instead of by the collector: a stored traceback would keep the hooks on the model.
    with (
        contextlib.closing(run_rollouts(job, keep, only=input_groups, progress=Silent())) as own,
        contextlib.closing(run_rollouts(there, pair, only=input_groups, progress=Silent())) as other,
    ):
        for _ in own:
            with changed:
                next(other)
        # The last batch is done. One more request ends the stage.
        next(other, None)
    return {name: PairedSums(both.finish(), parameters[name].in_features) for name, both in sums.items()}


def _check(input_group: str, step: int, reference: Tensor, rows: Tensor) -> None:
    if reference.shape != rows.shape:
        raise CalibrationError(
            f"layer {input_group}, step {step}: {tuple(rows.shape)} rows in the quantized rollout, "
            f"{tuple(reference.shape)} in the full-precision one: the model's work depends on its values; "
            "calibrate with inputs of the full-precision rollout alone"
        )
