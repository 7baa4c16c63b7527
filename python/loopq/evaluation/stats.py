"""Statistics of measurements: intervals, an exact test, bootstraps over prompts, correlation.

SciPy computes the standard statistics. This module adapts them to the units of measurements (answers, prompts).
Every random procedure takes a seed and a number of resamples and returns both, so a report can be repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopq.errors import ConfigError, require
from loopq.storage.schema import Object

Floats = NDArray[np.float64]

N_RESAMPLES = 100_000
#: Nominal coverage of every interval.
LEVEL = 0.95
# Values in one batch of resamples. Limits memory and does not change results.
CHUNK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Parameters
    ----------
    estimate, low, high : float
        Estimate and interval ends, in the unit of the quantity.
    level : float
        Nominal coverage, 0.95 for a 95 % interval.
    method : str
        Method of the interval.
    n : int
        Observed units: answers, prompts or trials, depending on `method`.
    n_resamples : int
        Bootstrap resamples. 0 for methods without resampling.
    seed : int or None
        Seed of the resampling.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    n: int
    n_resamples: int = 0
    seed: int | None = None

    def to_json(self) -> Object:
        """Plain data for a report."""
        return asdict(self)


def sample(values: ArrayLike, name: str, positive: bool = False) -> Floats:
    """Values as one row. All are finite, and above 0 where `positive`."""
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0:
        raise ConfigError(f"{name}: no values")
    if not np.isfinite(array).all():
        raise ConfigError(f"{name}: value {int(np.argmin(np.isfinite(array)))} is not finite")
    if positive and (array <= 0).any():
        raise ConfigError(f"{name}: values above 0 are needed; value {int(np.argmin(array))} is not")
    return array


def same_length(*arrays: Floats) -> None:
    """Refuse paired values of different lengths."""
    sizes = [a.size for a in arrays]
    if len(set(sizes)) != 1:
        raise ConfigError(f"paired values need equal lengths; got {', '.join(map(str, sizes))}")


def wilson(successes: int, trials: int) -> Interval:
    """Wilson score interval of a proportion (Li, Table 24).

    Notes
    -----
    With p = k/n and z the normal quantile: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Examples
    --------
    >>> i = wilson(460, 1319)
    >>> round(100 * i.low, 1), round(100 * i.high, 1)
    (32.4, 37.5)
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigError(
            f"a proportion needs 0 <= successes <= trials and trials >= 1; got {successes}/{trials}"
        )
    interval = require("scipy.stats").binomtest(successes, trials).proportion_ci(LEVEL, "wilson")
    low, high = float(interval.low), float(interval.high)
    return Interval(successes / trials, low, high, LEVEL, "Wilson score interval over answers", trials)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact McNemar test from the items that only the first got right and only the second (Li, Table 10).

    The p value is min(1, 2 P[X <= min(b, c)]) with X binomial(b + c, 1/2), and 1 without discordant items.
    """
    if b < 0 or c < 0:
        raise ConfigError(f"discordant counts are at least 0; got {b} and {c}")
    if b + c == 0:
        return 1.0
    return float(require("scipy.stats").binomtest(min(b, c), b + c).pvalue)


def paired_proportion_difference(b: int, c: int, n: int, n_resamples: int = N_RESAMPLES) -> Interval:
    """Paired bootstrap of a difference of two proportions measured on the same n items (Li, Table 10).

    Only the first got b items right, only the second c. The interval is of (b - c) / n. Resampling n items with
    replacement is a multinomial draw over the three outcomes.
    """
    if min(b, c) < 0 or b + c > n or n < 1:
        raise ConfigError(f"need b, c >= 0 and b + c <= n; got b={b}, c={c}, n={n}")
    draws = np.random.default_rng(0).multinomial(n, [b / n, c / n, (n - b - c) / n], size=n_resamples)
    low, high = np.quantile((draws[:, 0] - draws[:, 1]) / n, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    method = "paired bootstrap over answers"
    return Interval((b - c) / n, float(low), float(high), LEVEL, method, n, n_resamples, 0)


def bootstrap(
    columns: Sequence[ArrayLike],
    statistic: Callable[..., Any],
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    method: str = "bootstrap over prompts",
) -> Interval:
    """Percentile bootstrap over units with several values each, one in each column. Units are resampled whole.

    `statistic(*columns, axis)` reduces the axis of the units. The report names the `method`. A single unit always
    resamples to itself. The interval then equals the estimate and carries no information.
    """
    arrays = [sample(c, method) for c in columns]
    same_length(*arrays)
    n = arrays[0].size
    estimate = low = high = float(statistic(*arrays, axis=-1))
    if n > 1:
        result = require("scipy.stats").bootstrap(
            arrays,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=n_resamples,
            batch=max(1, CHUNK // n),
            confidence_level=LEVEL,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
        low, high = (float(end) for end in result.confidence_interval)
    return Interval(estimate, low, high, LEVEL, method, n, n_resamples, seed)


def mean_interval(values: ArrayLike, n_resamples: int = N_RESAMPLES, seed: int = 0) -> Interval:
    """Prompt bootstrap of a mean, every prompt with equal weight."""
    return bootstrap([values], np.mean, n_resamples, seed)


def geometric_mean_ratio(
    numerator: ArrayLike, denominator: ArrayLike, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Interval:
    """Prompt bootstrap of the geometric mean of per-prompt ratios (Li, App. E)."""
    top = np.log(sample(numerator, "numerator", positive=True))
    bottom = np.log(sample(denominator, "denominator", positive=True))
    same_length(top, bottom)
    return bootstrap(
        [top - bottom],
        lambda x, axis: np.exp(x.mean(axis)),
        n_resamples,
        seed,
        "bootstrap over prompts of a geometric mean of ratios",
    )


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson correlation. NaN for a constant side or fewer than two values."""
    return _correlation("pearsonr", x, y)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman rank correlation with mean ranks for ties. NaN as in `pearson`."""
    return _correlation("spearmanr", x, y)


def _correlation(function: str, x: ArrayLike, y: ArrayLike) -> float:
    a, b = sample(x, "x"), sample(y, "y")
    same_length(a, b)
    if a.size < 2:
        return float("nan")
    stats = require("scipy.stats")
    with warnings.catch_warnings():
        # SciPy warns about a constant side and returns NaN, as documented here.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        return float(getattr(stats, function)(a, b).statistic)
