"""The statistics of the paper's tables: intervals, exact tests, bootstraps over prompts, rank correlation.

Everything here is plain NumPy on small arrays. Every random procedure takes a seed and a number of resamples
and hands both back with its result, so that a report can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopq.errors import ConfigError

Floats = NDArray[np.float64]

N_RESAMPLES = 100_000
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Parameters
    ----------
    estimate, low, high : float
        Estimate and both ends, in the unit of the quantity.
    level : float
        Nominal coverage, 0.95 for a 95 % interval.
    method : str
        How the interval was made.
    n : int
        Units that were observed: answers, prompts or trials, as `method` says.
    n_resamples : int
        Bootstrap resamples; 0 where there are none.
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

    def to_json(self) -> dict[str, Any]:
        """Plain data for a report."""
        return asdict(self)


def _sample(values: ArrayLike, name: str, positive: bool = False) -> Floats:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0:
        raise ConfigError(f"{name}: no values")
    if not np.isfinite(array).all():
        raise ConfigError(f"{name}: value {int(np.argmin(np.isfinite(array)))} is not finite")
    if positive and (array <= 0).any():
        raise ConfigError(
            f"{name}: a geometric mean needs values above 0; value {int(np.argmin(array))} is not"
        )
    return array


def _same_length(*arrays: Floats) -> None:
    sizes = [a.size for a in arrays]
    if len(set(sizes)) != 1:
        raise ConfigError(f"paired values need equal lengths; got {', '.join(map(str, sizes))}")


def _level(level: float) -> float:
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level must lie between 0 and 1; got {level}")
    return level


def _ends(draws: Floats, level: float) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Wilson score interval of a proportion (Li, Table 24).

    Parameters
    ----------
    successes, trials : int
        Counts.
    level : float
        Nominal coverage.

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
    z = NormalDist().inv_cdf((1 + _level(level)) / 2)
    p = successes / trials
    shrink = 1 + z * z / trials
    middle = (p + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / shrink
    # At 0 and n the formula's end is 0 or 1 in exact arithmetic, not always in floating point.
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == trials else min(1.0, middle + half)
    return Interval(p, low, high, level, "Wilson score interval over answers", trials)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact McNemar test from the discordant counts (Li, Table 10).

    Parameters
    ----------
    b, c : int
        Items that only the one, and only the other, got right.

    Returns
    -------
    float
        min(1, 2 P[X <= min(b, c)]) for X binomial(b + c, 1/2); 1 where nothing is discordant.

    Notes
    -----
    Summed in integers and divided once, so p values of 1e-300 keep their digits.
    """
    if b < 0 or c < 0:
        raise ConfigError(f"discordant counts are at least 0; got {b} and {c}")
    n = b + c
    term = total = 1
    for k in range(min(b, c)):
        term = term * (n - k) // (k + 1)
        total += term
    # Dividing integers in Python rounds once, also where both overflow a float.
    return min(1.0, 2 * total / (1 << n))


def paired_proportion_difference(
    b: int, c: int, n: int, level: float = 0.95, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Interval:
    """Paired bootstrap of a difference of two proportions measured on the same items (Li, Table 10).

    Parameters
    ----------
    b, c : int
        Items that only the first, and only the second, got right.
    n : int
        All items.

    Returns
    -------
    Interval
        Of (b - c) / n. Resampling n items with replacement is a multinomial draw over the three outcomes.
    """
    if min(b, c) < 0 or b + c > n or n < 1:
        raise ConfigError(f"need b, c >= 0 and b + c <= n; got b={b}, c={c}, n={n}")
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(n, [b / n, c / n, (n - b - c) / n], size=n_resamples)
    low, high = _ends((draws[:, 0] - draws[:, 1]) / n, _level(level))
    return Interval((b - c) / n, low, high, level, "paired bootstrap over answers", n, n_resamples, seed)


def bootstrap(
    columns: Sequence[ArrayLike],
    statistic: Callable[..., Floats],
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    method: str = "bootstrap over prompts",
) -> Interval:
    """Percentile bootstrap over units that carry several values each.

    Parameters
    ----------
    columns : sequence of array_like, shape (n_units,)
        One value of each unit per column; the units are resampled, their columns stay together.
    statistic : callable
        Takes the columns as arrays (n_draws, n_units) and returns one number per row; for the estimate it is
        given the columns as one row.
    level, n_resamples, seed
        Coverage, number of resamples, seed.
    method : str
        Name for the report.
    """
    arrays = [_sample(c, method) for c in columns]
    _same_length(*arrays)
    n = arrays[0].size
    estimate = float(statistic(*(a[None, :] for a in arrays))[0])
    rng = np.random.default_rng(seed)
    draws = np.empty(n_resamples)
    rows = max(1, _CHUNK // n)
    for start in range(0, n_resamples, rows):
        picks = rng.integers(0, n, size=(min(rows, n_resamples - start), n))
        draws[start : start + len(picks)] = statistic(*(a[picks] for a in arrays))
    low, high = _ends(draws, _level(level))
    return Interval(estimate, low, high, level, method, n, n_resamples, seed)


def mean_interval(
    values: ArrayLike, level: float = 0.95, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Interval:
    """Prompt bootstrap of a mean, every prompt with equal weight."""
    return bootstrap([values], lambda x: x.mean(axis=1), level, n_resamples, seed)


# Two-sided 95 % quantiles of Student's distribution by degrees of freedom.
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


def student(values: ArrayLike) -> Interval:
    """Student's 95 % interval of a mean over few independent repetitions, such as seeds.

    Parameters
    ----------
    values : array_like, shape (n,)
        One value of each repetition, 2 to 10 of them.

    Raises
    ------
    ConfigError
        Fewer than 2 values, or more than 10: a bootstrap serves there.

    Notes
    -----
    mean +- t_{n-1} s / sqrt(n), s the sample standard deviation. With three values t is 4.3: the interval is
    wide because three values say little.

    Examples
    --------
    >>> i = student([0.50, 0.52, 0.54])
    >>> round(i.low, 3), round(i.high, 3)
    (0.47, 0.57)
    """
    x = _sample(values, "values")
    if not 2 <= x.size <= len(_STUDENT) + 1:
        raise ConfigError(f"Student's interval is for 2 to {len(_STUDENT) + 1} values; got {x.size}")
    half = _STUDENT[x.size - 2] * float(x.std(ddof=1)) / math.sqrt(x.size)
    mean = float(x.mean())
    return Interval(mean, mean - half, mean + half, 0.95, "Student's t over repetitions", int(x.size))


def cluster_rate(
    hits: ArrayLike, sizes: ArrayLike, level: float = 0.95, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Interval:
    """Prompt-cluster bootstrap of a rate pooled over positions (Li, App. J).

    Parameters
    ----------
    hits, sizes : array_like, shape (n_prompts,)
        Positions of each prompt that agree, and all its positions. Prompts are resampled whole.
    """
    return bootstrap(
        [hits, sizes],
        lambda h, n: h.sum(axis=1) / n.sum(axis=1),
        level,
        n_resamples,
        seed,
        "prompt-cluster bootstrap, positions pooled",
    )


def cluster_rate_difference(
    hits_a: ArrayLike,
    hits_b: ArrayLike,
    sizes: ArrayLike,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Prompt-cluster bootstrap of the difference a - b of two pooled rates on the same positions (Li, App. J)."""
    return bootstrap(
        [hits_a, hits_b, sizes],
        lambda a, b, n: (a.sum(axis=1) - b.sum(axis=1)) / n.sum(axis=1),
        level,
        n_resamples,
        seed,
        "paired prompt-cluster bootstrap, positions pooled",
    )


def geometric_mean_ratio(
    numerator: ArrayLike,
    denominator: ArrayLike,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Prompt bootstrap of the geometric mean of per-prompt ratios (Li, App. E)."""
    top = np.log(_sample(numerator, "numerator", positive=True))
    bottom = np.log(_sample(denominator, "denominator", positive=True))
    _same_length(top, bottom)
    return bootstrap(
        [top - bottom],
        lambda x: np.exp(x.mean(axis=1)),
        level,
        n_resamples,
        seed,
        "bootstrap over prompts of a geometric mean of ratios",
    )


def median_ratio(
    numerator: ArrayLike,
    denominator: ArrayLike,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Paired bootstrap of median(numerator) / median(denominator): a latency ratio over trials (Li, Sec. 6.2)."""
    _sample(numerator, "numerator", positive=True)
    _sample(denominator, "denominator", positive=True)
    return bootstrap(
        [numerator, denominator],
        lambda a, b: np.median(a, axis=1) / np.median(b, axis=1),
        level,
        n_resamples,
        seed,
        "paired bootstrap over trials of a ratio of medians",
    )


def difference_in_differences(
    plain_reference: ArrayLike,
    plain_treated: ArrayLike,
    other_reference: ArrayLike,
    other_treated: ArrayLike,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Prompt bootstrap of mean(other shift) - mean(plain shift), shift = treated - reference (Li, App. K)."""
    return bootstrap(
        [plain_reference, plain_treated, other_reference, other_treated],
        lambda a, b, c, d: (d - c).mean(axis=1) - (b - a).mean(axis=1),
        level,
        n_resamples,
        seed,
        "bootstrap over prompts of a difference in differences",
    )


def sign_flip(effects: ArrayLike, n_resamples: int = 99_999, seed: int = 0, exact_up_to: int = 16) -> float:
    """Two-sided sign-flip test that paired effects are symmetric around 0 (Li, App. K).

    Parameters
    ----------
    effects : array_like, shape (n_prompts,)
        One signed effect for each prompt.
    n_resamples : int
        Random sign patterns where not all 2^n are counted.
    seed : int
        Seed of the patterns.
    exact_up_to : int
        Up to this many effects all patterns are counted.

    Returns
    -------
    float
        Share of patterns whose |mean| is at least the observed one. Monte Carlo counts the observed pattern
        too, (1 + hits) / (1 + n_resamples), and is never 0.
    """
    x = _sample(effects, "effects")
    observed = abs(float(x.sum()))
    # Patterns that equal the observed sum in exact arithmetic must count although rounding differs.
    bar = observed - 1e-9 * float(np.abs(x).sum())
    if x.size <= exact_up_to:
        patterns = np.arange(2**x.size)[:, None] >> np.arange(x.size) & 1
        return float((np.abs((1 - 2 * patterns) @ x) >= bar).mean())
    rng = np.random.default_rng(seed)
    hits = 0
    rows = max(1, _CHUNK // x.size)
    for start in range(0, n_resamples, rows):
        signs = rng.integers(0, 2, size=(min(rows, n_resamples - start), x.size), dtype=np.int8)
        hits += int((np.abs((1.0 - 2.0 * signs) @ x) >= bar).sum())
    return (1 + hits) / (1 + n_resamples)


def holm(p_values: ArrayLike) -> Floats:
    """Holm's step-down adjustment; the order of the input is kept.

    Notes
    -----
    p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j)) for the j-th smallest of m, counted from 1.
    """
    p = _sample(p_values, "p values")
    if (p < 0).any() or (p > 1).any():
        raise ConfigError("p values lie between 0 and 1")
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(p.size, 0, -1)))
    out = np.empty_like(p)
    out[order] = adjusted
    return out


def ranks(values: ArrayLike) -> Floats:
    """Ranks from 1 for the smallest, ties with their mean rank."""
    x = _sample(values, "values")
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = (last - (counts - 1) / 2)[inverse]
    return mean


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson correlation; NaN where a side is constant, since it is undefined there."""
    a, b = _sample(x, "x"), _sample(y, "y")
    _same_length(a, b)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman rank correlation, ties with their mean rank."""
    a, b = _sample(x, "x"), _sample(y, "y")
    _same_length(a, b)
    return pearson(ranks(a), ranks(b))


def gap_closed(value: float, rtn: float, base: float) -> float:
    """Share of the gap from rounding to full precision that is closed (Li, Table 2).

    Parameters
    ----------
    value, rtn, base : float
        Unrounded metric of the method, of round-to-nearest and of full precision, in whatever direction is
        better.

    Returns
    -------
    float
        (value - rtn) / (base - rtn): 1 at full precision, 0 at round-to-nearest, negative where worse.
    """
    if base == rtn:
        raise ConfigError(f"round-to-nearest equals full precision ({base}): there is no gap to close")
    return (value - rtn) / (base - rtn)
