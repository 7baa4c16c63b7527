"""Scores of a model on the items of a task, by the rules of lm-evaluation-harness, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopq.evaluate.items import Item, find_task
from loopq.evaluate.requests import encode_pair, log_likelihoods, longest_input
from loopq.execution import Execution
from loopq.stats import Interval, bootstrap, mcnemar_exact, paired_proportion_difference, wilson
from loopq.systems.load import LoadedModel

#: Of a perplexity, whose resampling costs items times this.
_N_RESAMPLES = 10_000


def _perplexity(nll: ArrayLike, sizes: ArrayLike, axis: int = -1) -> NDArray[np.float64]:
    return np.asarray(np.exp(np.sum(nll, axis) / np.sum(sizes, axis)))


@dataclass(frozen=True)
class Metric:
    """One number of each item, and the task's own that they make.

    Parameters
    ----------
    name : str
        As the harness calls it.
    values : ndarray, float64, shape (n_items,)
        1 where the item is right, else 0; of a perplexity the negative log-likelihood in nats.
    sizes : ndarray, float64, shape (n_items,), optional
        Of a perplexity: words of each item, or 1.
    """

    name: str
    values: NDArray[np.float64]
    sizes: NDArray[np.float64] | None = None

    @property
    def value(self) -> float:
        """Share of the items that are right, or exp(sum of the values / sum of the sizes)."""
        return float(self.values.mean() if self.sizes is None else _perplexity(self.values, self.sizes))

    def interval(self) -> Interval:
        """95 %: Wilson's of a share, bootstrap over items of a perplexity."""
        if self.sizes is None:
            return wilson(int(self.values.sum()), self.values.size)
        return bootstrap(
            [self.values, self.sizes], _perplexity, n_resamples=_N_RESAMPLES, method="bootstrap over items"
        )

    def change(self, before: Metric) -> tuple[Interval, float | None]:
        """What other weights made of the same items, by a paired bootstrap over items.

        Returns
        -------
        change : Interval
            Difference of the shares, this one minus `before`; of perplexities this one divided by `before`.
        p_value : float or None
            Of the exact McNemar test; None of a perplexity.
        """
        if self.sizes is not None:
            columns = [self.values - before.values, self.sizes]
            method = "paired bootstrap over items of a ratio"
            return bootstrap(columns, _perplexity, n_resamples=_N_RESAMPLES, method=method), None
        gained, lost = (
            int((a > b).sum()) for a, b in ((self.values, before.values), (before.values, self.values))
        )
        return paired_proportion_difference(gained, lost, self.values.size), mcnemar_exact(gained, lost)


@dataclass(frozen=True)
class Scores:
    """What a model made of a task's items.

    Parameters
    ----------
    metrics : tuple of Metric
        The task's, in the order in which the harness prints them.
    n_cut : int
        Items whose context was cut at its left because the model has no positions for all of it.
    """

    metrics: tuple[Metric, ...]
    n_cut: int

    def __getitem__(self, name: str) -> Metric:
        """Return the metric of that name."""
        return next(m for m in self.metrics if m.name == name)


def score(
    loaded: LoadedModel,
    task: str,
    items: Sequence[Item],
    execution: Execution | None = None,
    *,
    n_steps: int | None = None,
) -> Scores:
    """Score a model on items of a task.

    Parameters
    ----------
    loaded : LoadedModel
        A model with logits; weights that are replaced while this runs are those that are scored.
    task : str
        Name of the task.
    items : sequence of Item
        From `loopq.evaluate.items.read_items`.
    execution : Execution, optional
        Seed of the initial states, batch size and progress.
    n_steps : int, optional
        Depth; the system's default when absent.

    Returns
    -------
    Scores
        "acc" (the right answer has the largest likelihood) and "acc_norm" (the largest likelihood per character) of
        choices; "perplexity" and "acc" (the last word is the greedy continuation) of last words; "word_perplexity" of
        texts.
    """
    how, kind = execution or Execution(), find_task(task).kind
    blank = "" if kind == "text" else " "
    asked = [(i, choice) for i, item in enumerate(items) for choice in item.choices]
    requests = [encode_pair(loaded, items[i].context, blank + choice) for i, choice in asked]
    found = log_likelihoods(
        loaded, requests, n_steps=n_steps, seed=how.seed, batch_size=how.batch_size, progress=how.progress
    )
    by_item: list[list[float]] = [[] for _ in items]
    for (i, _), (value, _) in zip(asked, found, strict=True):
        by_item[i].append(value)
    longest = longest_input(loaded)
    cut = {i for (i, _), (a, b) in zip(asked, requests, strict=True) if len(a) + len(b) > longest + 1}
    if kind == "choices":
        return Scores(_accuracy(items, by_item), len(cut))
    nll = -np.array(by_item)[:, 0]
    sizes = np.array([float(item.n_words) for item in items])
    if kind == "text":
        return Scores((Metric("word_perplexity", nll, sizes),), 0)
    greedy = np.array([float(is_greedy) for _, is_greedy in found])
    return Scores((Metric("perplexity", nll, sizes), Metric("acc", greedy)), len(cut))


def _accuracy(items: Sequence[Item], by_item: Sequence[Sequence[float]]) -> tuple[Metric, ...]:
    """Whether the right answer is the most likely one, plainly and by the number of its characters."""
    right = np.zeros((2, len(items)))
    for i, (item, values) in enumerate(zip(items, by_item, strict=True)):
        total, sizes = np.array(values), np.array([len(choice) for choice in item.choices])
        right[:, i] = total.argmax() == item.gold, (total / sizes).argmax() == item.gold
    return Metric("acc", right[0]), Metric("acc_norm", right[1])
