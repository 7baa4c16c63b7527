"""Per-step Hessians of one layer, wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError

Floats = NDArray[np.float64]


class StepHessians(Protocol):
    """H_t = X_t^T X_t of one input at each recurrence step, over the same token positions.

    The accumulators of the native core, with their steps kept apart, and `ArrayHessians` are both this.
    """

    @property
    def dim(self) -> int:
        """Input width."""

    @property
    def steps(self) -> Sequence[int]:
        """Steps that are there, ascending."""

    def n_rows(self, step: int) -> int:
        """Rows of X_t."""

    def matrix(self, steps: Sequence[int]) -> Floats:
        """Sum of H_t over some steps, float64, shape (dim, dim)."""


@dataclass(frozen=True)
class ArrayHessians:
    """Per-step Hessians as one array.

    Parameters
    ----------
    stack : ndarray, float64, shape (n_steps, dim, dim)
        H_t for each step.
    rows : sequence of int
        Rows of X_t for each step.
    """

    stack: Floats
    rows: Sequence[int]

    def __post_init__(self) -> None:
        if self.stack.ndim != 3 or self.stack.shape[1] != self.stack.shape[2]:
            raise ConfigError(f"Hessians are stacked as (n_steps, dim, dim); got shape {self.stack.shape}")
        if len(self.rows) != len(self.stack):
            raise ConfigError(f"{len(self.stack)} Hessians need as many row counts; got {len(self.rows)}")

    @classmethod
    def of_rows(cls, rows: Sequence[NDArray[np.floating]]) -> ArrayHessians:
        """Build from the input rows X_t (n_rows, dim) of each step."""
        wide = [np.asarray(x, dtype=np.float64) for x in rows]
        return cls(np.stack([x.T @ x for x in wide]), [len(x) for x in wide])

    @property
    def dim(self) -> int:
        """Input width."""
        return int(self.stack.shape[1])

    @property
    def steps(self) -> Sequence[int]:
        """Steps that are there, ascending."""
        return range(len(self.stack))

    def n_rows(self, step: int) -> int:
        """Rows of X_t."""
        return int(self.rows[step])

    def matrix(self, steps: Sequence[int]) -> Floats:
        """Sum of H_t over some steps."""
        total: Floats = self.stack[list(steps)].sum(axis=0)
        return total
