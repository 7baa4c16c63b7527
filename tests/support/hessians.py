"""Per-step Hessians of one layer as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ArrayHessians:
    """H_t of each step, a float64 array of shape (n_steps, dim, dim), and the rows of each X_t."""

    stack: NDArray[np.float64]
    rows: Sequence[int]
    per_step = True

    @classmethod
    def of_rows(cls, rows):
        """Build from the input rows X_t (n_rows, dim) of each step."""
        wide = [np.asarray(x, dtype=np.float64) for x in rows]
        return cls(np.stack([x.T @ x for x in wide]), [len(x) for x in wide])

    @property
    def dim(self):
        return int(self.stack.shape[1])

    @property
    def steps(self):
        return range(len(self.stack))

    def n_rows(self, step):
        return int(self.rows[step])

    def matrix(self, steps=None, *, weights=None):
        chosen = self.stack[list(self.steps if steps is None else steps)]
        return np.tensordot(np.ones(len(chosen)) if weights is None else weights, chosen, axes=1)

    def diagonal(self, steps=None):
        return np.diag(self.matrix(steps))

    def trace(self, step=None):
        return float(self.diagonal(None if step is None else [step]).sum())
