"""Reconstruction proxy tr(dW H_t dW^T) along the rollout, and activation magnitudes (Li, App. J and P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.hessians import StepHessians
from loopq.errors import ConfigError
from loopq.evaluation.stats import pearson
from loopq.storage.schema import Object

Floats = NDArray[np.float64]


def step_proxies(error: NDArray[np.float32], hessians: StepHessians, threads: int = 0) -> Floats:
    """Reconstruction proxy tr(dW H_t dW^T) of every step, one term of Li, Eq. 3 each.

    Parameters
    ----------
    error : float32 ndarray of shape (out_features, in_features)
        dW = W^ - W.
    hessians : StepHessians
        H_t of the layer's input.
    threads : int
        Threads of the core; 0 takes all cores.

    Returns
    -------
    ndarray, float64, shape (n_steps,)
    """
    return np.array([native.proxy(error, None, hessians.matrix([t]), threads) for t in hessians.steps])


def summarise_proxies(per_layer: Mapping[str, Floats]) -> Object:
    """Sum per-step proxies over layers (Li, App. J).

    Parameters
    ----------
    per_layer : mapping of str to ndarray, shape (n_steps,)
        `step_proxies` of each layer. All layers have the same depth.

    Returns
    -------
    dict
        `per_step`, `max_over_min` and `step0_share`. `uniform_share` is 1/N.
    """
    lengths = {len(v) for v in per_layer.values()}
    if len(lengths) != 1:
        raise ConfigError(f"only layers with the same number of steps can be summed; got {sorted(lengths)}")
    total = np.sum(list(per_layer.values()), axis=0)
    low = float(total.min())
    return {
        "per_step": total.tolist(),
        "max_over_min": float(total.max()) / low if low > 0 else None,
        "step0_share": float(total[0] / total.sum()) if total.sum() > 0 else None,
        "uniform_share": 1.0 / len(total),
    }


def channel_rms(hessian: Floats, n_rows: int) -> Floats:
    """Root mean square of each input channel, float64, shape (dim,)."""
    rms: Floats = np.sqrt(np.maximum(np.diag(hessian), 0.0) / max(n_rows, 1))
    return rms


def magnitude_stability(hessians: StepHessians) -> Object:
    """Pearson correlation of channel magnitudes between the first step and each later one (Li, Sec. 4).

    Magnitudes are root mean squares from the Hessian's diagonal. None where a side is constant.
    """
    steps: Sequence[int] = list(hessians.steps)
    rms = {t: channel_rms(hessians.matrix([t]), hessians.n_rows(t)) for t in steps}
    found = [pearson(rms[steps[0]], rms[t]) for t in steps]
    clean = [None if np.isnan(r) else r for r in found]
    return {"per_step": clean, "first_last": clean[-1], "magnitude": "root mean square of each input channel"}
