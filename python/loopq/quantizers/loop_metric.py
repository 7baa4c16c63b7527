"""What an error of a layer costs at the end of the loop, as one matrix between outputs and one between inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopq.layers.transforms import Rotation

# Share of its own added to each diagonal entry between outputs: gradients of some hundred draws see few directions.
RIDGE = 0.1
# The same for H before it is inverted.
DAMPING = 0.01
# Share of the mean over rows that each row's own weight gets at least. Some rows hardly touch any gradient, those of
# bytes that no text holds say: without it they take the errors of all others, far beyond where second order holds.
FLOOR = 0.01
#: Outputs that are taken as coupled with each other: those of other blocks are not.
BLOCK = 512


def n_gradient_prompts(most: int | None, n_prompts: int) -> int:
    """Prompts, of so many, that gradients are taken on: all, or at most as many as asked for."""
    return n_prompts if most is None else min(n_prompts, most)


@dataclass(frozen=True)
class LoopMetric:
    """The loss of a layer's error D at the end of the rollout, nearly tr(A D S D^T).

    Parameters
    ----------
    left : tuple of ndarray, float64
        A, blocks of consecutive outputs, each of shape (b, b); rows of different blocks are taken as not coupled.
    right : ndarray, float64, shape (in_features, in_features)
        The part of S that gradients give. The solver adds the layer's Hessian to it.
    n_gradients : int
        Gradients that both are sums over.

    Notes
    -----
    With g_n = sum_t G_nt^T X_nt the gradient of a drawn label's log-likelihood with respect to the shared weight,
    through all steps that use it, KL ~ E <g, D>^2 / 2, and E vec(g) vec(g)^T is taken as S (x) A:

        A = sum_n g_n H'^-1 g_n^T (damped by RIDGE),  S_g = sum_n g_n^T D^-1 g_n,  D nearly diag A,

    one round of the alternation that fits a matrix normal distribution, started from the damped Hessian H'. Both
    dampings are shares of each own diagonal entry, and H and S_g are brought together by the median ratio of their
    diagonals: a channel that is made louder, with a column that is made smaller, changes nothing.
    """

    left: tuple[NDArray[np.float64], ...]
    right: NDArray[np.float64]
    n_gradients: int

    def combined(self, hessian: NDArray[np.float64]) -> NDArray[np.float64]:
        """S = H median(diag S_g / diag H) + S_g, the median over channels that are not always zero."""
        own, theirs = np.diag(hessian), np.diag(self.right)
        live = (own > 0) & (theirs > 0)
        if not live.any():
            return hessian + self.right
        return np.asarray(hessian * float(np.median(theirs[live] / own[live])) + self.right, dtype=np.float64)

    def floored(
        self, weight: NDArray[np.float32], combined: NDArray[np.float64]
    ) -> list[NDArray[np.float64]]:
        """The blocks of A, each row's own entry raised to a least share.

        Parameters
        ----------
        weight : ndarray, float32, shape (out_features, in_features)
            W.
        combined : ndarray, float64, shape (in_features, in_features)
            S.

        Notes
        -----
        A row of size r_i = sum_j S_jj w_ij^2 counts for A_ii r_i; A_ii is raised by FLOOR times the mean of that
        over r_i. Sizes make it a matter of relative errors: a row that is made larger, with what reads it made
        smaller, changes nothing.
        """
        size = np.square(weight, dtype=np.float64) @ np.diag(combined)
        own = np.concatenate([np.diag(a) for a in self.left])
        floor = np.divide(FLOOR * float(np.mean(own * size)), size, out=np.zeros_like(size), where=size > 0)
        rows = np.split(floor, np.cumsum([len(a) for a in self.left])[:-1])
        return [a + np.diag(add) for a, add in zip(self.left, rows, strict=True)]

    def rotated(self, rotation: Rotation) -> LoopMetric:
        """The same in the rotated basis of the inputs."""
        return dataclasses.replace(self, right=rotation.conjugate(self.right))


def ridged(matrix: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """A matrix with a share of each diagonal entry added to it; a zero entry gets the mean."""
    diagonal = np.diag(matrix)
    mean = float(diagonal.mean()) or 1.0
    return np.asarray(matrix + np.diag(np.where(diagonal > 0, share * diagonal, mean)), dtype=np.float64)


def inverse(matrix: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Inverse of `ridged`, by way of unit diagonal: no scaling of a channel costs digits."""
    damped = ridged(matrix, share)
    root = 1.0 / np.sqrt(np.diag(damped))
    return np.asarray(np.linalg.inv(damped * root * root[:, None]) * root * root[:, None], dtype=np.float64)
