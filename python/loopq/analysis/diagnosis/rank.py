"""Calibration blindness: the rank of a layer's input Hessian at every step and over all steps (Li, Sec. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.hessians import StepHessians
from loopq.errors import ConfigError, NonFiniteError
from loopq.storage.schema import Object

Floats = NDArray[np.float64]

FOCAL = 1e-3
THRESHOLDS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
_MAX_POINTS = 400
# Wider layers count the rank at a few steps only, because each count is a factorisation.
_MAX_DIM_ALL_STEPS = 2048


def steps_to_count(n_steps: int, dim: int) -> list[int]:
    """Steps with a rank count: all for a narrow layer, a few for a wide one."""
    if dim <= _MAX_DIM_ALL_STEPS:
        return list(range(n_steps))
    return sorted({0, 1, n_steps // 8, n_steps // 4, n_steps // 2, n_steps - 1} & set(range(n_steps)))


def spectrum(hessian: Floats, threads: int = 0) -> Floats:
    """Eigenvalues of a Hessian, largest first, in float64.

    Raises
    ------
    NonFiniteError
        If the matrix contains NaN or infinity.

    Notes
    -----
    A sum of outer products has no negative eigenvalue. Values that rounding leaves below 0 are set to 0.
    """
    if not np.isfinite(hessian).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(hessian))[0])
        raise NonFiniteError(f"H[{row}, {column}] is {hessian[row, column]}; collect the Hessian again")
    values: Floats = np.maximum(native.eigvalsh(np.ascontiguousarray(hessian), threads=threads)[::-1], 0.0)
    return values


def thresholded_rank(values: Floats, threshold: float = FOCAL) -> int:
    """Number of eigenvalues above `threshold` times the largest (1e-3 in Li, Sec. 2). 0 for a zero matrix."""
    if not 0.0 <= threshold < 1.0:
        raise ConfigError(f"the rank threshold must lie in [0, 1); got {threshold}")
    return int((values > threshold * values.max()).sum())


def effective_rank(values: Floats) -> float:
    """exp(-sum p log p), p the normalized eigenvalues (Li, Table 22). A flat spectrum of n directions gives n."""
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
    """Count the directions above the solver's damping, a fraction of mean(diag H) added to the diagonal.

    Returns
    -------
    dict
        `above` counts eigenvalues above mu = damping * mean(lambda). `degrees` is sum lambda / (lambda + mu).
        `relative_mu` is mu / lambda_max, the threshold that corresponds to `above`.
    """
    mu = damping * float(values.mean())
    top = float(values.max())
    if top <= 0.0:
        return {"above": 0, "degrees": 0.0, "relative_mu": 0.0}
    degrees = float((values / (values + mu)).sum()) if mu > 0 else float((values > 0).sum())
    return {"above": int((values > mu).sum()), "degrees": degrees, "relative_mu": mu / top}


def describe_spectrum(values: Floats, damping: float = 0.01) -> Object:
    """Describe one spectrum: ranks by threshold, effective and stable rank, trace, directions above the damping."""
    return {
        "rank": thresholded_rank(values),
        "ranks": {f"{tau:g}": thresholded_rank(values, tau) for tau in THRESHOLDS},
        "effective_rank": effective_rank(values),
        "stable_rank": stable_rank(values),
        "trace": float(values.sum()),
        "largest": float(values.max()),
        "felt": felt_directions(values, damping),
    }


def curve(values: Floats) -> dict[str, list[float]]:
    """Points of a spectrum plot: all eigenvalues, or 400 at most, evenly spaced in log index."""
    n = len(values)
    index = (
        np.arange(n)
        if n <= _MAX_POINTS
        else np.unique(np.geomspace(1, n, _MAX_POINTS).round().astype(int)) - 1
    )
    return {"index": (index + 1).tolist(), "value": values[index].tolist()}


def rank_gain(deployed: int, first: int) -> float | None:
    """Rank of the sum over steps divided by the rank at step 0 (Li, Table 18). None for a rank of 0."""
    return deployed / first if first else None


def layer_ranks(
    hessians: StepHessians,
    blocks: Mapping[str, slice] | None = None,
    steps: Sequence[int] | None = None,
    threads: int = 0,
) -> Object:
    """Ranks and step-0 shares of one layer's input (Li, Sec. 4).

    Parameters
    ----------
    hessians : StepHessians
        Per-step Hessians over the same token positions.
    blocks : mapping of str to slice, optional
        Blocks of a concatenated input ("state", "embedding"). Each is also measured separately.
    steps : sequence of int, optional
        Steps to count besides the first and the last. All when absent. The sum always includes all steps.
    threads : int
        Threads of the factorisations; 0 takes all cores.

    Returns
    -------
    dict
        `per_step` holds rank, trace and rows of each H_t (Li, Table 19). `first`, `last` and `all` are the `count` of
        H_0, H_{N-1} and the sum. Then follow `rank_ratio`, `rank_gain` (Li, Table 18), `step0_trace_share` and
        `trace_ratio_0_1` (Li, App. P). `blocks` holds the same for each block.

    Notes
    -----
    A rank takes one factorisation (`loopq._native.count_above`). All eigenvalues take some twenty times as long, so
    `layer_spectra` computes them only for plots.
    """
    stored = list(hessians.steps)
    counted = sorted({stored[0], stored[-1], *(stored if steps is None else steps)})
    out = _survey(hessians, slice(0, hessians.dim), counted, threads)
    if blocks:
        out["blocks"] = {name: _survey(hessians, part, counted, threads) for name, part in blocks.items()}
    return out


def count(hessian: Floats, threads: int = 0) -> Object:
    """Count the eigenvalues above `FOCAL` times the largest without computing them.

    Returns
    -------
    dict
        `rank` (Li, Sec. 2), `trace` and `largest` eigenvalue. `stable_rank` is trace over largest (Li, Table 22).
    """
    largest, (rank,) = native.count_above(hessian, [FOCAL], threads)
    trace = float(np.trace(hessian))
    stable = trace / largest if largest > 0 else 0.0
    return {"rank": rank, "trace": trace, "largest": largest, "stable_rank": stable}


def _survey(hessians: StepHessians, part: slice, counted: Sequence[int], threads: int) -> Object:
    steps = list(hessians.steps)
    dim = len(range(*part.indices(hessians.dim)))
    traces = [float(hessians.diagonal([step])[part].sum()) for step in steps]
    ranks = {step: count(hessians.matrix([step])[part, part], threads) for step in counted}
    out: Object = {
        "dim": dim,
        "per_step": [
            {"step": s, "rank": c["rank"], "trace": c["trace"], "n_rows": hessians.n_rows(s)}
            for s, c in ranks.items()
        ],
        "first": ranks[steps[0]],
        "last": ranks[steps[-1]],
        "all": count(hessians.matrix(steps)[part, part], threads),
        "step0_trace_share": traces[0] / sum(traces) if sum(traces) > 0 else None,
        "trace_ratio_0_1": traces[0] / traces[1] if len(traces) > 1 and traces[1] > 0 else None,
    }
    out["rank_ratio"] = out["first"]["rank"] / dim
    out["rank_gain"] = rank_gain(out["all"]["rank"], out["first"]["rank"])
    return out


def layer_spectra(hessians: StepHessians, damping: float = 0.01, threads: int = 0) -> Object:
    """Eigenvalues of one layer's input at the first and the last step and of the sum over all (Li, Fig. 5).

    `damping` is the solver's, for `felt_directions`.

    Returns
    -------
    dict
        Each of `first`, `last` and `all` has a `curve` and the output of `describe_spectrum` (Li, Table 22).
    """
    steps = list(hessians.steps)
    out = {}
    for name, chosen in (("first", steps[:1]), ("last", steps[-1:]), ("all", steps)):
        values = spectrum(hessians.matrix(chosen), threads)
        out[name] = curve(values) | describe_spectrum(values, damping)
    return out


def drawn(layers: Mapping[str, Mapping[str, Any]], exposed: Sequence[str] = ()) -> list[str]:
    """Inputs to draw spectra of: the bottleneck, the largest gain and the first of the `exposed` ones."""
    chosen = [bottleneck(layers), largest_gain(layers), *[name for name in exposed if name in layers][:1]]
    return list(dict.fromkeys(name for name in chosen if name is not None))


def bottleneck(layers: Mapping[str, Mapping[str, Any]]) -> str:
    """Layer with the lowest ratio of step-0 rank to width (Li, Table 18). The first one on a tie."""
    return min(layers, key=lambda name: layers[name]["rank_ratio"])


def largest_gain(layers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Layer with the largest rank gain (Li, Table 18). None where no layer has one."""
    known = [name for name in layers if layers[name]["rank_gain"] is not None]
    return max(known, key=lambda name: layers[name]["rank_gain"]) if known else None
