"""Tasks: how items are scored, against scores worked out in the test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.paper import tasks
from loopq.paper.items import Item
from loopq.paper.tasks import score
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.requests import generate_until
from loopq.settings.execution import Execution
from loopq.systems.base import Batch


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
    scores = score(loaded, "hellaswag", items, Execution(batch_size=3))
    assert [m.name for m in scores.metrics] == ["acc", "acc_norm"]
    assert scores["acc"].values.tolist() == [float(gold == plain) for gold in range(4)]
    assert scores["acc_norm"].values.tolist() == [float(gold == normal) for gold in range(4)]
    assert scores.n_cut == 0


def test_a_last_word_is_right_where_it_is_the_greedy_one(loaded) -> None:
    items = [Item("He went to the", (word,)) for word in ("house", "s", "sea and the sky")]
    expected = [likelihood(loaded, i.context, f" {i.choices[0]}") for i in items]
    scores = score(loaded, "lambada", items)
    assert scores["acc"].values.tolist() == [float(greedy) for _, greedy in expected]
    assert scores["perplexity"].value == pytest.approx(math.exp(-sum(v for v, _ in expected) / 3), rel=1e-6)


def test_a_text_counts_its_own_words_and_reports_long_contexts(loaded) -> None:
    text = "It was a long day."
    scores = score(loaded, "wikitext", [Item("", (text,), n_words=7)])
    value, _ = likelihood(loaded, "\n", text)
    assert scores["word_perplexity"].value == pytest.approx(math.exp(-value / 7), rel=1e-6)
    # 128 positions: 123 + 6 bytes are the most, of which the last one is only predicted.
    items = [Item("a" * n, ("house",)) for n in (123, 124)]
    assert score(loaded, "lambada", items).n_cut == 1
    assert score(loaded, "wikitext", [Item("", (text * 20,))]).n_cut == 0


@pytest.mark.parametrize(
    ("text", "answer", "strict", "flexible"),
    [
        (" 2 + 2 = 4\n#### 4", "So.\n#### 4", 1, 1),
        ("#### 1,200.", "#### 1200", 1, 1),
        ("#### 5 and #### 6", "#### 5", 1, 0),
        (" It is $18.", "#### 18", 0, 1),
        ("#### -3 or 4", "#### -3", 1, 0),
        ("no number", "#### 1", 0, 0),
        ("####4", "#### 4", 0, 1),
    ],
)
def test_numbers_are_found_strictly_and_flexibly(loaded, monkeypatch, text, answer, strict, flexible) -> None:
    monkeypatch.setattr(tasks, "generate_until", lambda *_: text)
    scores = score(loaded, "gsm8k", [Item("Q", (answer,))])
    assert scores["exact_match,strict-match"].value == strict
    assert scores["exact_match,flexible-extract"].value == flexible


def test_answers_are_what_the_model_writes(loaded, monkeypatch) -> None:
    # Of 32 positions half are for the answer, as many letters; the prompt is cut to the other half at its left.
    monkeypatch.setattr(loaded.model.config, "block_size", 32)
    context = "Question: How many days has a week?\nAnswer:"
    ids = list(context[-16:].encode())
    for _ in range(16):
        batch = Batch(torch.tensor([ids]), (0,), 0, by_token=True)
        ids.append(int(loaded.system.rollout(batch, 2)[0, -1].argmax()))
    text = bytes(ids[16:]).decode()
    decoder = Decoder(loaded.system, 2, Generation(n_tokens=256))
    assert generate_until(loaded, context, decoder, decoder.settings, ()) == text
    stop = text[5:7]
    assert generate_until(loaded, context, decoder, decoder.settings, (stop,)) == text[: text.index(stop)]
    items = [Item(context, (f"#### {number}",)) for number in ("7", text)]
    scores = score(loaded, "gsm8k", [*items, Item("a week?\nAnswer:", ("#### 7",))], n_steps=2)
    assert scores.n_cut == 2
    assert scores["exact_match,flexible-extract"].values.tolist() == [0.0, 0.0, 0.0]


def test_a_model_without_logits_has_no_scores(loaded, monkeypatch) -> None:
    monkeypatch.setattr(type(loaded.system), "output", "hidden")
    with pytest.raises(ConfigError, match="gives hidden states, so there is no text"):
        score(loaded, "lambada", [Item("a", ("b",))])
