"""Tasks: how items are scored, against scores worked out in the test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loopq.evaluate.items import Item
from loopq.evaluate.tasks import Metric, score
from loopq.execution import Execution
from loopq.systems.base import Batch
from loopq.systems.load import load_model


@pytest.fixture(scope="module")
def loaded():
    torch.set_num_threads(1)
    return load_model("huginn_small")


def likelihood(loaded, context: str, answer: str) -> tuple[float, bool]:
    """Likelihood of an answer by one rollout, in nats, and whether it is the greedy one."""
    ids = torch.tensor([list((context + answer).encode())])
    out = loaded.system.rollout(Batch(ids[:, :-1], (0,), 0, by_token=True), 8).double().log_softmax(-1)[0]
    n = len(answer.encode())
    wanted = ids[0, -n:]
    logp = out[-n:]
    return float(logp.gather(-1, wanted[:, None]).sum()), bool((logp.argmax(-1) == wanted).all())


def test_choices_are_compared_by_likelihood_and_per_character(loaded) -> None:
    # Letters of two bytes: a character counts once.
    context, choices = "He went to the", ("house", "zq", "old house on the hill", "s\u00e9\u00e9\u00e9\u00e9")
    values = [likelihood(loaded, context, f" {c}")[0] for c in choices]
    plain = int(np.argmax(values))
    normal = int(np.argmax([v / len(c) for v, c in zip(values, choices, strict=True)]))
    items = [Item(context, choices, gold) for gold in range(4)]
    found = score(loaded, "hellaswag", items, Execution(batch_size=3))
    assert [m.name for m in found.metrics] == ["acc", "acc_norm"]
    assert found["acc"].values.tolist() == [float(gold == plain) for gold in range(4)]
    assert found["acc_norm"].values.tolist() == [float(gold == normal) for gold in range(4)]
    assert found.n_cut == 0


def test_a_last_word_is_right_where_it_is_the_greedy_one(loaded) -> None:
    items = [Item("He went to the", (word,)) for word in ("house", "s", "sea and the sky")]
    expected = [likelihood(loaded, i.context, f" {i.choices[0]}") for i in items]
    found = score(loaded, "lambada", items)
    assert found["acc"].values.tolist() == [float(greedy) for _, greedy in expected]
    assert found["perplexity"].value == pytest.approx(math.exp(-sum(v for v, _ in expected) / 3), rel=1e-6)


def test_a_text_counts_with_its_own_words_and_long_contexts_are_told(loaded) -> None:
    text = "It was a long day."
    found = score(loaded, "wikitext", [Item("", (text,), n_words=7)])
    value, _ = likelihood(loaded, "\n", text)
    assert found["word_perplexity"].value == pytest.approx(math.exp(-value / 7), rel=1e-6)
    # 128 positions: 123 + 6 bytes are the most, of which the last one is only predicted.
    items = [Item("a" * n, ("house",)) for n in (123, 124)]
    assert score(loaded, "lambada", items).n_cut == 1
    assert score(loaded, "wikitext", [Item("", (text * 20,))]).n_cut == 0


def test_changes_are_paired_over_items() -> None:
    before, after = (Metric("acc", np.array([1.0] * a + [0.0] * (40 - a))) for a in (30, 20))
    change, p = after.change(before)
    assert change.estimate == -0.25
    assert change.low < -0.25 < change.high < 0
    # Ten items changed, all one way: 2 / 2^10.
    assert p == pytest.approx(2 / 1024)
    i = before.interval()
    assert (round(i.low, 3), i.estimate, round(i.high, 3)) == (0.598, 0.75, 0.858)
    words = np.array([10.0, 20.0, 30.0])
    one, two = (Metric("word_perplexity", words * v, words) for v in (2.0, 2.5))
    ratio, none = two.change(one)
    assert (ratio.estimate, none) == (pytest.approx(math.exp(0.5)), None)
    # Every word lost the same: the ratio does not vary although the texts do.
    assert ratio.low == pytest.approx(ratio.high)
    assert one.interval().estimate == one.value == pytest.approx(math.exp(2.0))
