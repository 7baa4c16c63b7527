"""Cost of a layer's error at the end of the loop: one matrix between outputs and one between inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Share of its own value added to each diagonal entry between outputs: a few hundred draws see few directions.
RIDGE = 0.1
# The same for H before it is inverted.
DAMPING = 0.01
# Least weight of a row, as a share of the mean over rows. Some rows hardly touch any gradient, such as those of bytes
# that never occur. Without a floor they absorb the errors of all others, where the second-order model fails.
FLOOR = 0.01
#: Outputs that are treated as coupled with each other. Different blocks are treated as independent.
BLOCK = 512


def n_gradient_prompts(most: int | None, n_prompts: int) -> int:
    """Number of prompts for gradients: all of them, or at most `most`."""
    return n_prompts if most is None else min(n_prompts, most)


@dataclass(frozen=True)
class LoopMetric:
    """Loss of a layer's error D at the end of the rollout, approximately tr(A D S D^T).

    Parameters
    ----------
    sums : tuple of ndarray, float32 or float64
        A before `ridge`, in blocks of consecutive outputs, each of shape (b, b). Different blocks are treated as
        independent. It is empty for experts that share S.
    right : ndarray, float32 or float64, shape (in_features, in_features)
        The gradient part of S. The solver adds the layer's Hessian to it. It is empty for experts that share A.
    n_gradients : int
        Gradients in both sums.
    ridge : float
        Share of its own value that is added to each diagonal entry of A, when the layer is solved.

    Notes
    -----
    g_n = sum_t G_nt^T X_nt is the gradient of a drawn label's log-likelihood with respect to the shared weight, through
    all steps that use it. Then KL ~ E <g, D>^2 / 2. E vec(g) vec(g)^T is approximated by S (x) A:

        A = sum_n g_n H'^-1 g_n^T (damped by RIDGE),  S_g = sum_n g_n^T D^-1 g_n,  D nearly diag A.

    This is one iteration of the fit of a matrix normal distribution, initialised with the damped Hessian H'. Both
    dampings are shares of each diagonal entry. The median ratio of their diagonals brings H and S_g to one scale.
    Therefore scaling a channel up and its column down changes nothing.
    """

    sums: tuple[NDArray[Any], ...]
    right: NDArray[Any]
    n_gradients: int
    ridge: float = 0.0

    @property
    def left(self) -> tuple[NDArray[np.float64], ...]:
        """The blocks of A, float64."""
        blocks = (a.astype(np.float64, copy=False) for a in self.sums)
        return tuple(ridged(a, self.ridge) if self.ridge else a for a in blocks)

    def combined(self, hessian: NDArray[np.float64]) -> NDArray[np.float64]:
        """S = H median(diag S_g / diag H) + S_g. The median ignores channels that are always zero."""
        if not self.right.size:
            return hessian
        diag, right = np.diag(hessian), np.diag(self.right)
        live = (diag > 0) & (right > 0)
        if not live.any():
            return np.asarray(hessian + self.right, dtype=np.float64)
        return np.asarray(hessian * float(np.median(right[live] / diag[live])) + self.right, dtype=np.float64)

    def floored(
        self, weight: NDArray[np.float32], combined: NDArray[np.float64]
    ) -> list[NDArray[np.float64]]:
        """Return the blocks of A, with each row's diagonal entry raised to a least share.

        Parameters
        ----------
        weight : ndarray, float32, shape (out_features, in_features)
            W.
        combined : ndarray, float64, shape (in_features, in_features)
            S.

        Notes
        -----
        A row of size r_i = sum_j S_jj w_ij^2 counts for A_ii r_i. A_ii is raised by FLOOR times the mean of A_ii r_i
        over r_i. Sizes make the floor a share of relative errors: scaling a row up and its readers down changes
        nothing.
        """
        size = np.square(weight, dtype=np.float64) @ np.diag(combined)
        left = self.left
        diag = np.concatenate([np.diag(a) for a in left])
        floor = np.divide(FLOOR * float(np.mean(diag * size)), size, out=np.zeros_like(size), where=size > 0)
        rows = np.split(floor, np.cumsum([len(a) for a in left])[:-1])
        return [a + np.diag(add) for a, add in zip(left, rows, strict=True)]

    def united(self, hessian: NDArray[np.float64]) -> tuple[NDArray[np.float64], LoopMetric]:
        """Return S, and the metric without its gradient part, which S contains: for another basis of the inputs.

        The median in `combined` would be another one there.
        """
        return self.combined(hessian), dataclasses.replace(self, right=np.zeros((0, 0)))


def ridged(matrix: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return the matrix with a share of each diagonal entry added; a zero entry gets the mean."""
    diagonal = np.diag(matrix)
    mean = float(diagonal.mean()) or 1.0
    return np.asarray(matrix + np.diag(np.where(diagonal > 0, share * diagonal, mean)), dtype=np.float64)


def inverse(matrix: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return the inverse of `ridged`. It is computed with unit diagonal, so scaling a channel costs no digits."""
    damped = ridged(matrix, share)
    root = 1.0 / np.sqrt(np.diag(damped))
    return np.asarray(np.linalg.inv(damped * root * root[:, None]) * root * root[:, None], dtype=np.float64)
