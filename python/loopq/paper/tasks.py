"""Score a model on the items of a task by the rules of lm-evaluation-harness, with intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loopq.evaluation.metric import Metric
from loopq.models.load import LoadedModel
from loopq.paper.items import Item, find_task
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.requests import encode_pair, generate_until, log_likelihoods, longest_input, n_generated
from loopq.settings.execution import Execution
from loopq.terminal.progress import Progress

#: Tokens of an answer at most, and what ends it, as the harness has them for GSM8K; what stands where no number is.
_N_ANSWER = 256
_STOPS = ("Question:", "</s>", "<|im_end|>")
_NONE = "[invalid]"


@dataclass(frozen=True)
class Scores:
    """Scores of a model on a task's items.

    Parameters
    ----------
    metrics : tuple of Metric
        The task's metrics in the harness's order.
    n_cut : int
        Number of items with a context cut at its left because it exceeded the model's positions.
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
        A model with logits. If its weights are replaced during the run, the replaced weights are scored.
    task : str
        Name of the task.
    items : sequence of Item
        From `loopq.paper.items.read_items`.
    execution : Execution, optional
        Seed of the initial states, batch size and progress.
    n_steps : int, optional
        Depth. The system's default when absent.

    Returns
    -------
    Scores
        Metrics by kind.

        Choices give "acc" (the right answer has the largest likelihood) and "acc_norm" (the largest likelihood per
        character). Last words give "perplexity" and "acc" (the last word is the greedy continuation). Texts give
        "word_perplexity". Numbers give "exact_match" by the harness's two extraction rules.

    Raises
    ------
    ConfigError
        If the model is not causal or gives no logits.
    """
    how, kind = execution or Execution(), find_task(task).kind
    depth = n_steps if n_steps is not None else loaded.system.n_steps
    # Rejects a model that reads in both directions: its likelihoods would include the answer.
    decoder = Decoder(loaded.system, depth, Generation(n_tokens=_N_ANSWER, seed=how.seed))
    if kind == "number":
        return _numbers(loaded, items, decoder, how.progress, task)
    blank = "" if kind == "text" else " "
    asked = [(i, choice) for i, item in enumerate(items) for choice in item.choices]
    requests = [encode_pair(loaded, items[i].context, blank + choice) for i, choice in asked]
    likelihoods = log_likelihoods(loaded, requests, n_steps=depth, label=task, execution=how)
    by_item: list[list[float]] = [[] for _ in items]
    for (i, _), (value, _) in zip(asked, likelihoods, strict=True):
        by_item[i].append(value)
    longest = longest_input(loaded)
    cut = {i for (i, _), (a, b) in zip(asked, requests, strict=True) if len(a) + len(b) > longest + 1}
    if kind == "choices":
        return Scores(_accuracy(items, by_item), len(cut))
    nll = -np.array(by_item)[:, 0]
    sizes = np.array([float(item.n_words) for item in items])
    if kind == "text":
        return Scores((Metric("word_perplexity", nll, sizes),), 0)
    greedy = np.array([float(is_greedy) for _, is_greedy in likelihoods])
    return Scores((Metric("perplexity", nll, sizes), Metric("acc", greedy)), len(cut))


def _accuracy(items: Sequence[Item], by_item: Sequence[Sequence[float]]) -> tuple[Metric, ...]:
    """Whether the right answer is the most likely one, by total and by per-character likelihood."""
    right = np.zeros((2, len(items)))
    for i, (item, values) in enumerate(zip(items, by_item, strict=True)):
        total, sizes = np.array(values), np.array([len(choice) for choice in item.choices])
        right[:, i] = total.argmax() == item.gold, (total / sizes).argmax() == item.gold
    return Metric("acc", right[0]), Metric("acc_norm", right[1])


def _numbers(
    loaded: LoadedModel, items: Sequence[Item], decoder: Decoder, progress: Progress, label: str
) -> Scores:
    """Generate an answer to each item and compare its number with the right one."""
    right, n_cut, longest = np.zeros((2, len(items))), 0, longest_input(loaded)
    room = longest - n_generated(_N_ANSWER, longest)
    progress.start(label, len(items), "answers")
    for i, item in enumerate(items):
        n_cut += len(loaded.encode(item.context)) > room
        text = generate_until(loaded, item.context, decoder, decoder.settings, _STOPS)
        right[:, i] = [_plain(number) == _plain(item.choices[0]) for number in _found_numbers(text)]
        progress.advance(1)
    progress.stop()
    names = ("exact_match,strict-match", "exact_match,flexible-extract")
    return Scores(tuple(Metric(name, values) for name, values in zip(names, right, strict=True)), n_cut)


def _found_numbers(text: str) -> tuple[str, str]:
    """The first number after GSM8K's mark, and the last number of the text."""
    strict, all_numbers = re.search(r"#### (-?[0-9.,]+)", text), re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return strict[1] if strict else _NONE, all_numbers[-1] if all_numbers else _NONE


def _plain(answer: str) -> str:
    """A number without commas, currency and full stop. For a right answer, the text after its mark."""
    text = answer.replace(",", "").replace("$", "").rpartition("#### ")[2]
    return text.removesuffix(".").lower()
