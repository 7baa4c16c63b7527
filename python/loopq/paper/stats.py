"""Statistics that only the paper's tables need: repetitions, pooled rates, tests of paired effects, a gap."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from loopq.errors import ConfigError, require
from loopq.evaluation.stats import (
    CHUNK,
    LEVEL,
    N_RESAMPLES,
    Floats,
    Interval,
    bootstrap,
    sample,
)


def student(values: ArrayLike) -> Interval:
    """Student's t interval of a mean over few independent repetitions, such as seeds.

    Parameters
    ----------
    values : array_like, shape (n,)
        One value per repetition, at least 2.

    Raises
    ------
    ConfigError
        Fewer than 2 values.

    Notes
    -----
    mean +- t_{n-1} s / sqrt(n) with s the sample standard deviation. For three values t is 4.3, so the interval is
    wide.

    Examples
    --------
    >>> i = student([0.50, 0.52, 0.54])
    >>> round(i.low, 3), round(i.high, 3)
    (0.47, 0.57)
    """
    x = sample(values, "values")
    if x.size < 2:
        raise ConfigError(f"Student's interval needs at least 2 values; got {x.size}")
    t = float(require("scipy.stats").t.ppf((1 + LEVEL) / 2, x.size - 1))
    half = t * float(x.std(ddof=1)) / float(np.sqrt(x.size))
    mean = float(x.mean())
    return Interval(mean, mean - half, mean + half, LEVEL, "Student's t over repetitions", int(x.size))


def cluster_rate(hits: ArrayLike, sizes: ArrayLike, n_resamples: int = N_RESAMPLES) -> Interval:
    """Prompt-cluster bootstrap of a rate pooled over positions (Li, App. J).

    Parameters
    ----------
    hits, sizes : array_like of shape (n_prompts,)
        Agreeing positions of each prompt, and all its positions. Prompts are resampled whole.
    """
    return bootstrap(
        [hits, sizes],
        lambda h, n, axis: h.sum(axis) / n.sum(axis),
        n_resamples,
        method="prompt-cluster bootstrap, positions pooled",
    )


def difference_in_differences(
    plain_reference: ArrayLike,
    plain_treated: ArrayLike,
    other_reference: ArrayLike,
    other_treated: ArrayLike,
    n_resamples: int = N_RESAMPLES,
) -> Interval:
    """Prompt bootstrap of mean(other shift) - mean(plain shift), shift = treated - reference (Li, App. K)."""
    return bootstrap(
        [plain_reference, plain_treated, other_reference, other_treated],
        lambda a, b, c, d, axis: (d - c).mean(axis) - (b - a).mean(axis),
        n_resamples,
        method="bootstrap over prompts of a difference in differences",
    )


def sign_flip(effects: ArrayLike, n_resamples: int = 99_999) -> float:
    """Two-sided sign-flip test that paired effects are symmetric around 0 (Li, App. K).

    Parameters
    ----------
    effects : array_like, shape (n_prompts,)
        One signed effect for each prompt.
    n_resamples : int
        Number of random sign patterns. If there are at most as many patterns (2^n), all are counted.

    Returns
    -------
    float
        Share of patterns with |sum| at least the observed one. The Monte Carlo estimate includes the observed pattern,
        (1 + hits) / (1 + n_resamples), so it is never 0. 1 for a single effect.
    """
    x = sample(effects, "effects")
    if x.size == 1:
        return 1.0
    result = require("scipy.stats").permutation_test(
        (x,),
        lambda values, axis: np.abs(values.sum(axis)),
        permutation_type="samples",
        vectorized=True,
        n_resamples=n_resamples,
        batch=max(1, CHUNK // x.size),
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def holm(p_values: ArrayLike) -> Floats:
    """Holm's step-down adjustment. Keeps the order of the input.

    Notes
    -----
    For the j-th smallest of m values, counted from 1: p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j)).
    """
    p = sample(p_values, "p values")
    if (p < 0).any() or (p > 1).any():
        raise ConfigError("p values lie between 0 and 1")
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(p.size, 0, -1)))
    out = np.empty_like(p)
    out[order] = adjusted
    return out


def gap_closed(value: float, rtn: float, base: float) -> float:
    """Share of the gap between rounding and full precision that a method closes (Li, Table 2).

    Parameters
    ----------
    value, rtn, base : float
        Raw metric of the method, of round-to-nearest and of full precision. Either direction may be better.

    Returns
    -------
    float
        (value - rtn) / (base - rtn): 1 at full precision, 0 at round-to-nearest, negative if worse.
    """
    if base == rtn:
        raise ConfigError(f"round-to-nearest equals full precision ({base}): there is no gap to close")
    return (value - rtn) / (base - rtn) + 0.0  # never -0.0
