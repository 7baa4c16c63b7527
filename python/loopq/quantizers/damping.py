"""What is added to the diagonal of H before it is factored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.config import DampingKind
from loopq.errors import ConfigError

TAIL_SHARE = 0.01


def damping_vector(
    hessian: NDArray[np.float64], kind: DampingKind, fraction: float, threads: int = 0
) -> NDArray[np.float64]:
    """Return mu, added to diag H.

    Parameters
    ----------
    hessian : ndarray, float64, shape (d, d)
        H over the steps chosen.
    kind : {"mean", "median", "diagonal", "tail"}
        "mean": mu_j = c mean(diag H), the published rule. "median": c median(diag H), blind to a few huge
        channels. "diagonal": c H_jj, so that scaling a channel scales its damping. "tail": c (tr H - the sum
        of the largest hundredth of the eigenvalues) / d, blind also to a huge direction that no channel shows.
    fraction : float
        c.
    threads : int
        Threads of the eigenvalues; 0 takes all cores.

    Returns
    -------
    ndarray, float64, shape (d,)
        A channel that is always zero gets the mean's damping under every kind: its weights are rounded.

    Notes
    -----
    With S = sum_t H_t a direction of energy r is seen by the solver only where r >> mu. A spike in one step
    raises the mean and so hides what the other steps show; the other three kinds do not follow the spike.
    """
    diagonal = np.ascontiguousarray(np.diag(hessian))
    mean = float(diagonal.mean())
    if kind == "mean":
        mu = np.full(len(diagonal), fraction * mean)
    elif kind == "median":
        live = diagonal[diagonal > 0]
        mu = np.full(len(diagonal), fraction * float(np.median(live)) if live.size else 0.0)
    elif kind == "diagonal":
        mu = fraction * diagonal
    elif kind == "tail":
        values = native.eigvalsh(hessian, threads=threads)
        kept = values[: len(values) - max(1, round(TAIL_SHARE * len(values)))]
        mu = np.full(len(diagonal), fraction * max(float(kept.sum()), 0.0) / len(diagonal))
    else:
        raise ConfigError(f"damping_kind must be mean, median, diagonal or tail; got {kind!r}")
    return np.where(diagonal > 0, mu, max(fraction, 1e-6) * (mean if mean > 0 else 1.0))
