"""Calibration blindness: the rank of a layer's input Hessian at every step and over all steps (Li, Sec. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.hessians import StepHessians
from loopq.errors import ConfigError, NonFiniteError

Floats = NDArray[np.float64]

FOCAL = 1e-3
THRESHOLDS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
_MAX_POINTS = 400
# Above this width the rank is counted at a few steps only: an eigenvalue problem of 10,560 takes minutes.
_MAX_DIM_ALL_STEPS = 2048


def steps_to_count(n_steps: int, dim: int) -> list[int]:
    """Steps whose rank is counted: all for a narrow layer, a few for a wide one."""
    if dim <= _MAX_DIM_ALL_STEPS:
        return list(range(n_steps))
    return sorted({0, 1, n_steps // 8, n_steps // 4, n_steps // 2, n_steps - 1} & set(range(n_steps)))


def spectrum(hessian: Floats, threads: int = 0) -> Floats:
    """Eigenvalues of a Hessian, largest first, in float64.

    Raises
    ------
    NonFiniteError
        NaN or infinity in the matrix.

    Notes
    -----
    A sum of outer products has no negative eigenvalue; values that rounding leaves below 0 are set to 0.
    """
    if not np.isfinite(hessian).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(hessian))[0])
        raise NonFiniteError(f"H[{row}, {column}] is {hessian[row, column]}; collect the Hessian again")
    values: Floats = np.maximum(native.eigvalsh(np.ascontiguousarray(hessian), threads=threads)[::-1], 0.0)
    return values


def thresholded_rank(values: Floats, threshold: float = FOCAL) -> int:
    """Number of eigenvalues above `threshold` times the largest (Li, Sec. 2); 0 for a zero matrix.

    Parameters
    ----------
    values : ndarray, float64, shape (dim,)
        Eigenvalues, in any order.
    threshold : float
        tau, between 0 and 1; Li, Sec. 2 takes 1e-3.
    """
    if not 0.0 <= threshold < 1.0:
        raise ConfigError(f"the rank threshold must lie in [0, 1); got {threshold}")
    return int((values > threshold * values.max()).sum())


def effective_rank(values: Floats) -> float:
    """exp(-sum p log p), p the eigenvalues over their sum (Li, Table 22): n for a flat spectrum of n directions."""
    total = float(values.sum())
    if total <= 0.0:
        return 0.0
    p = values[values > 0] / total
    return float(np.exp(-(p * np.log(p)).sum()))


def stable_rank(values: Floats) -> float:
    """tr(H) / lambda_max (Li, Table 22)."""
    top = float(values.max())
    return float(values.sum()) / top if top > 0 else 0.0


def felt_directions(values: Floats, damping: float) -> dict[str, float]:
    """Count the directions that stand out against the solver's damping.

    Parameters
    ----------
    values : ndarray, float64, shape (dim,)
        Eigenvalues.
    damping : float
        Fraction of mean(diag H) that is added to the diagonal.

    Returns
    -------
    dict
        `above`: eigenvalues above mu = damping * mean(lambda); `degrees`: sum lambda / (lambda + mu);
        `relative_mu`: mu / lambda_max, the threshold to which `above` corresponds.
    """
    mu = damping * float(values.mean())
    top = float(values.max())
    if top <= 0.0:
        return {"above": 0, "degrees": 0.0, "relative_mu": 0.0}
    degrees = float((values / (values + mu)).sum()) if mu > 0 else float((values > 0).sum())
    return {"above": int((values > mu).sum()), "degrees": degrees, "relative_mu": mu / top}


def describe_spectrum(
    values: Floats, thresholds: Sequence[float] = THRESHOLDS, damping: float = 0.01
) -> dict[str, Any]:
    """Ranks by threshold, effective and stable rank, trace, and directions above the damping, of one spectrum."""
    return {
        "rank": thresholded_rank(values),
        "ranks": {f"{tau:g}": thresholded_rank(values, tau) for tau in thresholds},
        "effective_rank": effective_rank(values),
        "stable_rank": stable_rank(values),
        "trace": float(values.sum()),
        "largest": float(values.max()),
        "felt": felt_directions(values, damping),
    }


def curve(values: Floats, max_points: int = _MAX_POINTS) -> dict[str, list[float]]:
    """Spectrum for a plot: all eigenvalues, or at most `max_points`, evenly spaced in the logarithm of the index."""
    n = len(values)
    index = (
        np.arange(n) if n <= max_points else np.unique(np.geomspace(1, n, max_points).round().astype(int)) - 1
    )
    return {"index": (index + 1).tolist(), "value": values[index].tolist()}


def rank_gain(deployed: int, first: int) -> float | None:
    """Rank of the sum over steps, over the rank at step 0 (Li, Table 18); None where that is 0."""
    return deployed / first if first else None


def layer_ranks(
    hessians: StepHessians,
    blocks: Mapping[str, slice] | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    damping: float = 0.01,
    steps: Sequence[int] | None = None,
    threads: int = 0,
) -> dict[str, Any]:
    """Ranks, spectra and step-0 shares of one layer's input (Li, Sec. 4).

    Parameters
    ----------
    hessians : StepHessians
        Per-step Hessians, all over the same token positions.
    blocks : mapping of str to slice, optional
        Blocks of a concatenated input ("state", "embedding"); each is measured separately as well.
    thresholds : sequence of float
        Thresholds at which ranks are counted.
    damping : float
        Damping of the solver, for `felt_directions`.
    steps : sequence of int, optional
        Steps whose rank is counted, besides the first and the last; all when absent. The sum always runs over all
        steps.
    threads : int
        Threads of the eigenvalue solver; 0 takes all cores.

    Returns
    -------
    dict
        `per_step`: rank, trace and rows of each H_t (Li, Table 19); `first`, `last`, `all`: counts of H_0, H_{N-1}
        and the sum (Li, Table 22); `rank_ratio`, `rank_gain` (Li, Table 18), `step0_trace_share`,
        `trace_ratio_0_1` (Li, App. P); `spectra` (Li, Fig. 5); `blocks`: the same for each block.
    """
    stored = list(hessians.steps)
    counted = sorted({stored[0], stored[-1], *(stored if steps is None else steps)})

    def survey(part: slice) -> dict[str, Any]:
        return _survey(hessians, part, counted, thresholds, damping, threads)

    out = survey(slice(0, hessians.dim))
    if blocks:
        out["blocks"] = {name: survey(part) for name, part in blocks.items()}
    return out


def _survey(
    hessians: StepHessians,
    part: slice,
    counted: Sequence[int],
    thresholds: Sequence[float],
    damping: float,
    threads: int,
) -> dict[str, Any]:
    steps = list(hessians.steps)
    dim = len(range(*part.indices(hessians.dim)))
    per_step, kept, traces = [], {}, []
    for step in steps:
        h = hessians.matrix([step])[part, part]
        traces.append(float(np.trace(h)))
        if step not in counted:
            continue
        values = spectrum(h, threads)
        if step in (steps[0], steps[-1]):
            kept[step] = values
        per_step.append(
            {
                "step": step,
                "rank": thresholded_rank(values),
                "trace": traces[-1],
                "n_rows": hessians.n_rows(step),
            }
        )
    deployed = spectrum(hessians.matrix(steps)[part, part], threads)
    first, last = kept[steps[0]], kept[steps[-1]]
    found: dict[str, Any] = {
        "dim": dim,
        "per_step": per_step,
        "first": describe_spectrum(first, thresholds, damping),
        "last": describe_spectrum(last, thresholds, damping),
        "all": describe_spectrum(deployed, thresholds, damping),
        "step0_trace_share": traces[0] / sum(traces) if sum(traces) > 0 else None,
        "trace_ratio_0_1": traces[0] / traces[1] if len(traces) > 1 and traces[1] > 0 else None,
        "spectra": {"first": curve(first), "last": curve(last), "all": curve(deployed)},
    }
    found["rank_ratio"] = found["first"]["rank"] / dim
    found["rank_gain"] = rank_gain(found["all"]["rank"], found["first"]["rank"])
    return found


def bottleneck(layers: Mapping[str, Mapping[str, Any]]) -> str:
    """Layer with the lowest step-0 rank over width (Li, Table 18); the first one on a tie."""
    return min(layers, key=lambda name: layers[name]["rank_ratio"])


def largest_gain(layers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Layer with the largest rank gain (Li, Table 18), or None where no layer has one."""
    known = [name for name in layers if layers[name]["rank_gain"] is not None]
    return max(known, key=lambda name: layers[name]["rank_gain"]) if known else None
