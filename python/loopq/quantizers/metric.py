"""What an error of a layer costs at the end of the loop, as one matrix between outputs and one between inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.config import DampingKind
from loopq.quantizers.damping import damping_vector
from loopq.rotation import Rotation

# Share of the mean added to the diagonal between outputs: gradients of some hundred draws see few directions.
RIDGE = 0.1


@dataclass(frozen=True)
class LoopMetric:
    """The loss of a layer's error D at the end of the rollout, nearly tr(A D S D^T).

    Parameters
    ----------
    left : tuple of ndarray, float64
        A, blocks of consecutive outputs, each of shape (b, b) with mean diagonal 1; rows of different blocks are
        taken as not coupled.
    right : ndarray, float64, shape (in_features, in_features)
        The part of S that gradients give, mean diagonal 1. The solver adds the layer's Hessian to it.
    n_gradients : int
        Gradients that both are sums over.

    Notes
    -----
    With g_n = sum_t G_nt^T X_nt the gradient of a drawn label's log-likelihood with respect to the shared weight,
    through all steps that use it, KL ~ E <g, D>^2 / 2, and E vec(g) vec(g)^T is taken as S (x) A:

        A = sum_n g_n H'^-1 g_n^T (damped by RIDGE),  S_g = sum_n g_n^T A^-1 g_n,

    one round of the alternation that fits a matrix normal distribution, started from the damped Hessian H'.
    """

    left: tuple[NDArray[np.float64], ...]
    right: NDArray[np.float64]
    n_gradients: int

    def combined(self, hessian: NDArray[np.float64]) -> NDArray[np.float64]:
        """S: the Hessian and the gradients' part, each with mean diagonal 1."""
        return unit(hessian) + self.right

    def prepared(self, threads: int) -> list[native.Prepared]:
        """The blocks of A in the order in which rows are solved, factored."""
        return [native.Prepared(a, np.zeros(len(a)), order="conditional", threads=threads) for a in self.left]

    def rotated(self, rotation: Rotation) -> LoopMetric:
        """The same in the rotated basis of the inputs."""
        return dataclasses.replace(self, right=rotation.conjugate(self.right))


def unit(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """A symmetric matrix scaled to mean diagonal 1; zero stays zero."""
    mean = float(np.diag(matrix).mean())
    return matrix / mean if mean > 0 else matrix


def ridged(matrix: NDArray[np.float64], ridge: float = RIDGE) -> NDArray[np.float64]:
    """`unit` of a matrix with `ridge` added to its diagonal."""
    return unit(matrix) + ridge * np.eye(len(matrix))


def damped_inverse(
    hessian: NDArray[np.float64], damping: float, kind: DampingKind, threads: int = 0
) -> NDArray[np.float64]:
    """(unit(H) + diag(mu))^-1, mu as the layer's settings say but not below 1 %."""
    scaled = unit(hessian)
    mu = damping_vector(scaled, kind, max(damping, 0.01), threads)
    return np.asarray(np.linalg.inv(scaled + np.diag(mu)), dtype=np.float64)
