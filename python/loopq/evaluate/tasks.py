"""Tasks from local files, scored by likelihood: the last word of LAMBADA, choices of ARC and HellaSwag, WikiText-2."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.evaluate.requests import encode_pair, log_likelihoods
from loopq.progress import Progress

if TYPE_CHECKING:
    from loopq.systems.load import LoadedModel

_ARTICLE = re.compile(r"^ = [^=]*[^= ][^=]* = $", re.MULTILINE)


@dataclass(frozen=True)
class Item:
    """One question.

    Parameters
    ----------
    context : str
        What stands before the answer.
    choices : tuple of str
        Answers whose likelihood is compared, each with its leading blank; one, where it must be the greedy
        continuation.
    gold : int
        The right one.
    """

    context: str
    choices: tuple[str, ...]
    gold: int = 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _lambada(path: Path) -> Iterator[Item]:
    for record in _lines(path):
        context, _, word = record["text"].rpartition(" ")
        yield Item(context, (f" {word}",))


def _arc(path: Path) -> Iterator[Item]:
    for record in _lines(path):
        yield Item(f"{record['query']}\nAnswer:", tuple(f" {c}" for c in record["choices"]), record["gold"])


def _hellaswag(path: Path) -> Iterator[Item]:
    for record in _lines(path):
        yield Item(record["query"], tuple(f" {c}" for c in record["choices"]), record["gold"])


def _articles(path: Path) -> Iterator[Item]:
    text = path.read_text(encoding="utf-8")
    starts = [m.start() for m in _ARTICLE.finditer(text)]
    for first, last in zip(starts, [*starts[1:], len(text)], strict=True):
        yield Item("", (text[first:last],))


#: Where each task lies in the data folder, and how it is read.
TASKS: Mapping[str, tuple[str, Callable[[Path], Iterator[Item]]]] = {
    "lambada": ("lambada/lambada_test.jsonl", _lambada),
    "arc-challenge": ("arc/arc_challenge_test.jsonl", _arc),
    "arc-easy": ("arc/arc_easy_test.jsonl", _arc),
    "hellaswag": ("hellaswag/hellaswag_val.jsonl.xz", _hellaswag),
    "wikitext2": ("wikitext2/wiki.test.raw", _articles),
}


def read_items(task: str, data: Path, n_items: int | None = None) -> list[Item]:
    """Read the first items of a task from the data folder.

    Raises
    ------
    ConfigError
        No such task, or no file of it in the folder.
    """
    if task not in TASKS:
        raise ConfigError(f"no task {task!r}; known: {', '.join(TASKS)}")
    name, read = TASKS[task]
    path = data / name
    if not path.is_file():
        raise ConfigError(f"task {task}: no file {path}; name another data folder")
    found: list[Item] = []
    for item in read(path):
        if n_items is not None and len(found) == n_items:
            break
        found.append(item)
    return found


@dataclass(frozen=True)
class Scores:
    """What a model made of a task's items.

    Parameters
    ----------
    correct : ndarray, float64, shape (n_items,)
        1 where the item is right: the answer with the largest likelihood per byte is the right one; of an item with one
        answer, whether it is the greedy continuation.
    nll : ndarray, float64, shape (n_items,)
        Negative log-likelihood of the right answer in nats.
    n_words : ndarray, int64, shape (n_items,)
        Words of the right answer, split at white space.
    """

    correct: NDArray[np.float64]
    nll: NDArray[np.float64]
    n_words: NDArray[np.int64]

    @property
    def word_perplexity(self) -> float:
        """exp of the negative log-likelihood per word (Li, Table 2's perplexity of WikiText-2)."""
        return float(np.exp(self.nll.sum() / self.n_words.sum()))


def score(
    loaded: LoadedModel,
    items: Sequence[Item],
    *,
    n_steps: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    longest: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score every answer of every item by its likelihood.

    Parameters
    ----------
    loaded : LoadedModel
        A model with logits; weights that are replaced while this runs are those that are scored.
    items : sequence of Item
        From `read_items`.
    n_steps : int, optional
        Depth; the system's default when absent.
    seed : int
        Seed of the initial states.
    batch_size : int
        Requests of one length that run together.
    longest : int, optional
        Tokens of the longest input; what the model's configuration says when absent.
    progress : Progress, optional
        Advanced by every request.

    Returns
    -------
    Scores
    """
    asked = [(i, c) for i, item in enumerate(items) for c in range(len(item.choices))]
    found = log_likelihoods(
        loaded,
        [encode_pair(loaded, items[i].context, items[i].choices[c]) for i, c in asked],
        n_steps=n_steps,
        seed=seed,
        batch_size=batch_size,
        longest=longest,
        progress=progress,
    )
    total = [np.zeros(len(item.choices)) for item in items]
    greedy = np.zeros(len(items), dtype=bool)
    for (i, c), (value, is_greedy) in zip(asked, found, strict=True):
        total[i][c], greedy[i] = value, is_greedy
    return _scores(items, total, greedy)


def _scores(items: Sequence[Item], total: Sequence[NDArray[np.float64]], greedy: NDArray[np.bool_]) -> Scores:
    correct = np.zeros(len(items))
    for i, item in enumerate(items):
        if len(item.choices) == 1:
            correct[i] = greedy[i]
            continue
        # Length without the blank before the answer, as evaluation harnesses normalise.
        sizes = np.array([len(c.strip().encode()) for c in item.choices])
        correct[i] = (total[i] / sizes).argmax() == item.gold
    nll = np.array([-t[item.gold] for t, item in zip(total, items, strict=True)])
    words = np.array([len(item.choices[item.gold].split()) for item in items], dtype=np.int64)
    return Scores(correct, nll, words)
