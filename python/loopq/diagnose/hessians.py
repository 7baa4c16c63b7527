"""Per-step Hessians of one layer, from any source."""

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

    Satisfied by the accumulators of the native core with `per_step`, and by `ArrayHessians`.
    """

    @property
    def dim(self) -> int:
        """Input width."""

    @property
    def steps(self) -> Sequence[int]:
        """Steps that are stored, ascending."""

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
            raise ConfigError(f"Hessians need shape (n_steps, dim, dim); got {self.stack.shape}")
        if len(self.rows) != len(self.stack):
            raise ConfigError(
                f"each of the {len(self.stack)} Hessians needs a row count; got {len(self.rows)}"
            )

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
        """Steps that are stored, ascending."""
        return range(len(self.stack))

    def n_rows(self, step: int) -> int:
        """Rows of X_t."""
        return int(self.rows[step])

    def matrix(self, steps: Sequence[int]) -> Floats:
        """Sum of H_t over some steps."""
        total: Floats = self.stack[list(steps)].sum(axis=0)
        return total
