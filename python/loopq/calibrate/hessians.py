"""Interface of all sources of Hessians: accumulators in memory, dumps, paired sums and plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class StepHessians(Protocol):
    """H_t = X_t^T X_t of one input at each recurrence step."""

    @property
    def dim(self) -> int:
        """Input width d."""

    @property
    def steps(self) -> Sequence[int]:
        """Available steps, ascending."""

    @property
    def per_step(self) -> bool:
        """Whether each step's Hessian is available, or only the sum over all steps."""

    def n_rows(self, step: int) -> int:
        """Rows of X_t."""

    def diagonal(self, steps: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Diagonal of the sum over steps, shape (d,)."""

    def matrix(
        self, steps: Sequence[int] | None = None, *, weights: Sequence[float] | None = None
    ) -> NDArray[Any]:
        """Sum of w_t H_t over steps, shape (d, d)."""


class Hessians(Protocol):
    """Hessians of every input group of a model."""

    def accumulator(self, input_group: str, steps: Sequence[int], *, per_step: bool = False) -> StepHessians:
        """Return the Hessians of an input group over the chosen steps, separately if `per_step`."""
