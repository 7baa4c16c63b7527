"""Damping: it is added to the diagonal of H before H is factored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.settings.declare import Settings, setting

#: Share of the eigenvalues (the largest ones) that "tail" excludes.
TAIL_SHARE = 0.01


@dataclass(frozen=True)
class Damping(Settings):
    """Damping, which is added to the diagonal of H.

    Parameters
    ----------
    fraction : float
        Damping of H as a fraction of the quantity that its kind names.
    kind : {"mean", "median", "diagonal", "tail"}
        Quantity that damping is a fraction of. `mean` takes the mean of diag H, the published rule. `median` takes its
        median and ignores a few huge channels. `diagonal` takes each entry itself, so scaling a channel scales its
        damping. `tail` takes the mean eigenvalue without the largest hundredth. It also ignores a huge direction that
        no single channel shows.
    """

    fraction: float = setting(0.01, at_least=0.0)
    kind: Literal["mean", "median", "diagonal", "tail"] = setting("mean")

    def vector(self, hessian: NDArray[np.float64], threads: int = 0) -> NDArray[np.float64]:
        """Return mu, the vector added to diag H.

        Parameters
        ----------
        hessian : ndarray, float64, shape (d, d)
            H over the chosen steps.
        threads : int
            Threads of the eigenvalues; 0 takes all cores.

        Returns
        -------
        ndarray, float64, shape (d,)
            A channel that is always zero gets the mean's damping. Its weights are rounded with every kind.

        Notes
        -----
        With S = sum_t H_t, the solver sees a direction of energy r only if r >> mu. A spike in one step raises the
        mean and so hides the other steps' energy. The other three kinds do not follow the spike.
        """
        diagonal = np.ascontiguousarray(np.diag(hessian))
        mean = float(diagonal.mean())
        if self.kind == "mean":
            mu = np.full(len(diagonal), self.fraction * mean)
        elif self.kind == "median":
            live = diagonal[diagonal > 0]
            mu = np.full(len(diagonal), self.fraction * float(np.median(live)) if live.size else 0.0)
        elif self.kind == "diagonal":
            mu = self.fraction * diagonal
        else:
            values = native.eigvalsh(hessian, threads=threads)
            kept = values[: len(values) - max(1, round(TAIL_SHARE * len(values)))]
            mu = np.full(len(diagonal), self.fraction * max(float(kept.sum()), 0.0) / len(diagonal))
        return np.where(diagonal > 0, mu, max(self.fraction, 1e-6) * (mean if mean > 0 else 1.0))


@dataclass(frozen=True)
class PublishedDamping(Damping):
    """Damping as published with GPTQ: with kind "mean" all channels get the same damping, including zero ones."""

    def vector(self, hessian: NDArray[np.float64], threads: int = 0) -> NDArray[np.float64]:
        """Return mu, the vector added to diag H."""
        if self.kind != "mean":
            return super().vector(hessian, threads)
        # Summed in order, as in GPTQ so far. NumPy's mean sums pairwise and differs in the last bits.
        diagonal = np.diag(hessian)
        return np.full(len(diagonal), self.fraction * (np.cumsum(diagonal)[-1] / len(diagonal)))
