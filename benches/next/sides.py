"""The loss tr(A D S D^T) of a weight's error, solved column by column by any code for columns.

A couples outputs and S couples inputs (`docs/loop-metric.md`). A code for columns keeps GPTQ's feedback between columns
exact: what a column leaves over is handed to the next one whole, however many of its rows one code word holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class Coder(Protocol):
    """A code for columns of outputs."""

    def encode(self, target: Matrix, scale: Matrix) -> Matrix:
        """Return code values, before scaling, near `target`, shape (out_features,), in the metric A."""


def pivots(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Factor M = R^T diag(p) R with R unit lower triangular, for decisions that are made first to last.

    e^T M e = sum_i p_i (e_i + sum_{h < i} R_ih e_h)^2: p_0 = 1 / (M^-1)_00 is what an error costs that all others make
    up for, p_n = M_nn what the last one costs.
    """
    flipped = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]
    diagonal = np.diag(flipped)
    return np.square(diagonal), (flipped / diagonal).T


def conditional_order(matrix: Matrix) -> NDArray[np.int64]:
    """Columns by falling 1 / [(S_F)^-1]_jj, F the columns that remain: the dear ones while all others can make up."""
    inverse = np.linalg.inv(matrix)
    left = np.ones(len(matrix), dtype=bool)
    order = np.zeros(len(matrix), dtype=np.int64)
    for i in range(len(matrix)):
        j = int(np.argmin(np.where(left, np.diag(inverse), np.inf)))
        order[i], left[j] = j, False
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return order


@dataclass
class TwoSided:
    """One weight and its metric.

    Parameters
    ----------
    weight : ndarray, float64, shape (out_features, in_features)
        W, or the shifted target of asymmetric calibration.
    left : ndarray, float64, shape (out_features, out_features)
        A.
    right : ndarray, float64, shape (in_features, in_features)
        S, damped.
    group : int
        Input columns that share a scale.
    """

    weight: Matrix
    left: Matrix
    right: Matrix
    group: int
    order: NDArray[np.int64] = field(init=False)
    pivot: Matrix = field(init=False)
    feedback: Matrix = field(init=False)

    def __post_init__(self) -> None:
        self.order = conditional_order(self.right)
        self.pivot, self.feedback = pivots(self.right[np.ix_(self.order, self.order)])

    @property
    def groups(self) -> NDArray[np.int64]:
        """Group of each column."""
        return np.arange(self.weight.shape[1]) // self.group

    def loss(self, values: Matrix) -> float:
        """tr(A D S D^T) of D = values - W."""
        error = values - self.weight
        return float(np.sum((self.left @ error) * (error @ self.right)))

    def first_scales(self, factor: float) -> Matrix:
        """Root mean square of each group of a row, columns weighted as their errors cost, times a factor."""
        cost = np.zeros(self.weight.shape[1])
        cost[self.order] = self.pivot
        groups = self.groups
        columns = [np.flatnonzero(groups == g) for g in range(int(groups[-1]) + 1)]
        square = [np.square(self.weight[:, c]) @ cost[c] / cost[c].sum() for c in columns]
        return stored(factor * np.sqrt(np.stack(square, axis=1)))

    def sweep(self, coder: Coder, scales: Matrix) -> Matrix:
        """GPTQ over columns in conditional order; returns code values."""
        codes, error = np.zeros_like(self.weight), np.zeros_like(self.weight)
        groups = self.groups
        for i, j in enumerate(self.order):
            made_up = error[:, self.order[:i]] @ self.feedback[i, :i]
            scale = scales[:, groups[j]]
            codes[:, j] = coder.encode(self.weight[:, j] - made_up, scale)
            error[:, j] = codes[:, j] * scale - self.weight[:, j]
        return codes

    def descend(self, coder: Coder, codes: Matrix, scales: Matrix) -> int:
        """Code each column again, in place, with all others fixed, where the loss falls; returns how many."""
        groups, kept = self.groups, 0
        error = codes * scales[:, groups] - self.weight
        for j in self.order[::-1]:
            scale, own = scales[:, groups[j]], self.right[j, j]
            rest = error @ self.right[:, j] / own - error[:, j]
            found = coder.encode(self.weight[:, j] - rest, scale)
            new = found * scale - self.weight[:, j]
            if _form(self.left, new + rest) < _form(self.left, error[:, j] + rest):
                codes[:, j], error[:, j] = found, new
                kept += 1
        return kept

    def refitted(self, codes: Matrix, scales: Matrix) -> Matrix:
        """The scales of least loss for given codes, all at once; the old ones where float16 undoes the gain.

        With B_g the code values of group g: sum_{g'} (A * (B_g S_gg' B_g'^T)) s_g' = rowsum(B_g S_g A W) in s.
        """
        groups = self.groups
        n = int(groups[-1]) + 1
        parts = [np.where(groups == g, codes, 0.0) for g in range(n)]
        normal = np.block([[self.left * (a @ self.right @ b.T) for b in parts] for a in parts])
        pull = self.left @ self.weight @ self.right
        wanted = np.concatenate([np.sum(a * pull, axis=1) for a in parts])
        normal += 1e-9 * np.diag(np.diag(normal)) + 1e-30 * np.eye(len(normal))
        found = stored(np.linalg.solve(normal, wanted).reshape(n, -1).T)
        fell = self.loss(codes * found[:, groups]) < self.loss(codes * scales[:, groups])
        return found if fell else scales


def _form(matrix: Matrix, vector: Matrix) -> float:
    return float(vector @ matrix @ vector)


def stored(scales: Matrix) -> Matrix:
    """Scales as float16 holds them."""
    rounded = scales.astype(np.float16).astype(np.float64)
    return np.where(rounded == 0, np.float64(np.finfo(np.float16).tiny), rounded)


def solve(
    problem: TwoSided, coder: Coder, factor: float, passes: int, told: Callable[[str, float], None]
) -> tuple[Matrix, Matrix]:
    """Sweep and refit of the scales, then descents, each followed by a refit.

    Returns
    -------
    codes, scales : ndarray
        Code values of shape (out_features, in_features) and scales of shape (out_features, n_groups).
    """
    scales = problem.first_scales(factor)
    codes = problem.sweep(coder, scales)
    told("swept", problem.loss(codes * scales[:, problem.groups]))
    scales = problem.refitted(codes, scales)
    told("refitted", problem.loss(codes * scales[:, problem.groups]))
    for _ in range(passes):
        problem.descend(coder, codes, scales)
        scales = problem.refitted(codes, scales)
        told("descended", problem.loss(codes * scales[:, problem.groups]))
    return codes, scales
