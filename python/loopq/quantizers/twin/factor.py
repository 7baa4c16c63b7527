"""S = H + diag(mu) for several inputs at once: the order of the columns, and S = A diag(p) A^T in that order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loopq._native import PIVOTS
from loopq.errors import SolveError

Order = Literal["natural", "diagonal", "conditional"]


@dataclass(frozen=True)
class Factors:
    """Damped, ordered and factored Hessians.

    Parameters
    ----------
    matrix : Tensor, float64, shape (L, d, d)
        S. Its columns keep the order of H.
    mu : Tensor, float64, shape (L, d)
        Damping added to diag H. One value for each column.
    order : Tensor, int64, shape (L, d)
        The column of H at each place. Places are the sweep's order.
    upper : Tensor, shape (L, d, d)
        A, unit upper triangular, by place.
    pivots : Tensor, float64, shape (L, d)
        p, by place.
    """

    matrix: Tensor
    mu: Tensor
    order: Tensor
    upper: Tensor
    pivots: Tensor

    @classmethod
    def of(
        cls,
        hessians: Tensor,
        mu: Tensor,
        rule: Order,
        names: Sequence[str],
        precision: torch.dtype = torch.float64,
    ) -> Factors:
        """Damp, order and factor H (L, d, d).

        Raises
        ------
        SolveError
            One H cannot be factored with this damping. The message names its layer.
        """
        matrix = hessians + torch.diag_embed(mu)
        n, d = mu.shape
        if rule == "conditional":
            order = by_conditional_energy(torch.cholesky_inverse(_cholesky(matrix, names)))
        elif rule == "diagonal":
            order = _by_diagonal(matrix, hessians)
        else:
            order = torch.arange(d, device=mu.device).expand(n, d)
        lower = _cholesky(permuted(matrix, order).flip(1, 2).to(precision), names)
        upper = lower.flip(1, 2)
        roots = upper.diagonal(dim1=1, dim2=2)
        return cls(matrix, mu, order, upper / roots[:, None], roots.double() ** 2)

    def in_order(self, columns: Tensor) -> Tensor:
        """Reorder columns (L, rows, d) by place."""
        return columns.gather(2, self.order[:, None].expand_as(columns))

    def back(self, places: Tensor) -> Tensor:
        """Reorder places (L, rows, d) by column."""
        return torch.empty_like(places).scatter_(2, self.order[:, None].expand_as(places), places)

    def energies(self) -> Tensor:
        """Cost of an error in a column after the later columns compensate for it, (L, d) by column."""
        return torch.empty_like(self.pivots).scatter_(1, self.order, self.pivots)


def permuted(matrix: Tensor, order: Tensor) -> Tensor:
    """Permute rows and columns of matrices (L, d, d) by an order (L, d)."""
    rows = matrix.gather(1, order[:, :, None].expand_as(matrix))
    return rows.gather(2, order[:, None].expand_as(matrix))


def _cholesky(matrix: Tensor, names: Sequence[str]) -> Tensor:
    lower, info = torch.linalg.cholesky_ex(matrix)
    finite = lower.diagonal(dim1=1, dim2=2).isfinite().all(1)
    bad = ((info != 0) | ~finite).nonzero()
    if len(bad):
        raise SolveError(
            f"layer {names[int(bad[0])]}: the damped Hessian is not positive definite in "
            f"{str(matrix.dtype).removeprefix('torch.')}; raise the damping, use float64, or give more rows"
        )
    return lower


def _by_diagonal(matrix: Tensor, hessians: Tensor) -> Tensor:
    """Order columns by falling diagonal of S, ties by falling diagonal of H, then by index."""
    order = hessians.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    damped = matrix.diagonal(dim1=1, dim2=2).gather(1, order)
    return order.gather(1, damped.argsort(dim=1, descending=True, stable=True))


def by_conditional_energy(inverse: Tensor) -> Tensor:
    """Return the order by falling conditional energy. The argument S^-1 (L, d, d) is overwritten.

    This is a Cholesky factorisation that takes the smallest remaining diagonal as the next pivot
    (factor/ordering.rs). Rows and columns are not moved. A used pivot gets an infinite diagonal.
    """
    n, d = inverse.shape[:2]
    at = torch.arange(n, device=inverse.device)
    diagonal = inverse.diagonal(dim1=1, dim2=2).clone()
    order = torch.empty(n, d, dtype=torch.int64, device=inverse.device)
    for first in range(0, d, PIVOTS):
        rows = inverse.new_zeros(n, min(PIVOTS, d - first), d)
        for step in range(rows.shape[1]):
            least, pivot = diagonal.min(1)
            order[:, first + step] = pivot
            row = inverse[at, pivot]
            if step:
                before = rows[:, :step]
                by = before.gather(2, pivot[:, None, None].expand(n, step, 1))
                row = row - (by.mT @ before)[:, 0]
            row = row / least.clamp_min(torch.finfo(least.dtype).tiny).sqrt()[:, None]
            rows[:, step] = row
            diagonal -= row * row
            diagonal.scatter_(1, pivot[:, None], math.inf)
        inverse.baddbmm_(rows.mT, rows, alpha=-1)
    return order
