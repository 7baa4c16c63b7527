"""A score with its interval, and its change from other weights on the same items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopq.evaluation.stats import Interval, bootstrap, mcnemar_exact, paired_proportion_difference, wilson
from loopq.storage.schema import Object

#: Of a perplexity, whose resampling costs items times this.
_N_RESAMPLES = 10_000


def _perplexity(nll: ArrayLike, sizes: ArrayLike, axis: int = -1) -> NDArray[np.float64]:
    return np.asarray(np.exp(np.sum(nll, axis) / np.sum(sizes, axis)))


@dataclass(frozen=True)
class Metric:
    """One number per item, and the task's metric computed from them.

    Parameters
    ----------
    name : str
        Name of the metric in the harness.
    values : float64 ndarray of shape (n_items,)
        1 where the item is right, else 0. For a perplexity, the negative log-likelihood in nats.
    sizes : float64 ndarray of shape (n_items,), optional
        For a perplexity, the words of each item, or 1.
    """

    name: str
    values: NDArray[np.float64]
    sizes: NDArray[np.float64] | None = None

    @property
    def value(self) -> float:
        """Share of the items that are right, or exp(sum of the values / sum of the sizes)."""
        return float(self.values.mean() if self.sizes is None else _perplexity(self.values, self.sizes))

    def interval(self) -> Interval:
        """95 % interval: Wilson's for a share, bootstrap over items for a perplexity."""
        if self.sizes is None:
            return wilson(int(self.values.sum()), self.values.size)
        return bootstrap(
            [self.values, self.sizes], _perplexity, n_resamples=_N_RESAMPLES, method="bootstrap over items"
        )

    def change(self, before: Metric) -> tuple[Interval, float | None]:
        """Change from other weights on the same items, by a paired bootstrap over items.

        Returns
        -------
        change : Interval
            Difference of the shares, this one minus `before`. For perplexities, this one divided by `before`.
        p_value : float or None
            p value of the exact McNemar test. None for a perplexity.
        """
        if self.sizes is not None:
            columns = [self.values - before.values, self.sizes]
            method = "paired bootstrap over items of a ratio"
            return bootstrap(columns, _perplexity, n_resamples=_N_RESAMPLES, method=method), None
        gained, lost = (
            int((a > b).sum()) for a, b in ((self.values, before.values), (before.values, self.values))
        )
        return paired_proportion_difference(gained, lost, self.values.size), mcnemar_exact(gained, lost)

    def to_json(self, before: Metric | None) -> Object:
        """Plain data: every item's value, the interval, and the change from `before` where given."""
        change, p_value = (None, None) if before is None else self.change(before)
        return {
            "metric": self.name,
            "interval": self.interval().to_json(),
            "change": None if change is None else change.to_json(),
            "p_value": p_value,
            "values": self.values.tolist(),
            "sizes": None if self.sizes is None else self.sizes.tolist(),
        }
