"""Tasks: how requests are cut and scored, against scores worked out in the test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from loopq.errors import ConfigError
from loopq.evaluate.tasks import Item, read_items, score
from loopq.systems.load import load_model


@pytest.fixture(scope="module")
def loaded():
    torch.set_num_threads(1)
    return load_model("huginn_small")


def likelihood(loaded, context: str, answer: str) -> tuple[float, bool]:
    """Likelihood of an answer by one rollout, in nats, and whether it is the greedy one."""
    from loopq.systems.base import Batch

    ids = torch.tensor([list((context + answer).encode())])
    out = loaded.system.rollout(Batch(ids[:, :-1], (0,), 0, by_token=True), 8).double().log_softmax(-1)[0]
    n = len(answer.encode())
    wanted = ids[0, -n:]
    logp = out[-n:]
    return float(logp.gather(-1, wanted[:, None]).sum()), bool((logp.argmax(-1) == wanted).all())


def test_answers_are_scored_by_their_likelihood(loaded) -> None:
    context, choices = "He went to the", (" house", " zq", " old house on the hill")
    expected = [likelihood(loaded, context, c) for c in choices]
    for gold, (value, _) in enumerate(expected):
        found = score(loaded, [Item(context, choices, gold)], batch_size=2)
        assert found.nll[0] == pytest.approx(-value, rel=1e-5)
        best = max(range(3), key=lambda i: expected[i][0] / len(choices[i].strip()))
        assert found.correct[0] == (best == gold)
    greedy = score(loaded, [Item(context, (c,)) for c in choices])
    assert greedy.correct.tolist() == [float(is_greedy) for _, is_greedy in expected]
    assert greedy.n_words.tolist() == [1, 1, 5]


def test_choices_are_compared_per_byte() -> None:
    from loopq.evaluate import tasks

    items = [Item("", (" ab", " abcdefgh"), 1)]
    made = tasks._scores(items, [np.array([-4.0, -8.0])], np.array([False]))
    # -4 / 2 bytes against -8 / 8 bytes.
    assert made.correct[0] == 1.0
    assert made.nll[0] == 8.0
    words = tasks._scores([Item("", ("one two  three",))], [np.array([-6.0])], np.array([True]))
    assert words.word_perplexity == pytest.approx(np.exp(2.0))
    assert words.correct[0] == 1.0


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "lambada").mkdir()
    lines = [json.dumps({"text": f"one two {w}"}) for w in ("three", "four")]
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text("\n".join(lines))
    assert read_items("lambada", tmp_path, 1) == [Item("one two", (" three",))]
    assert len(read_items("lambada", tmp_path)) == 2
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" = A = \n text\n = = B = = \n more\n = C = \n end")
    articles = read_items("wikitext2", tmp_path)
    assert [a.choices[0].split()[1] for a in articles] == ["A", "C"]
    with pytest.raises(ConfigError, match=r"no file .*arc_challenge_test.jsonl"):
        read_items("arc-challenge", tmp_path)
    with pytest.raises(ConfigError, match="no task 'gsm9k'; known: lambada"):
        read_items("gsm9k", tmp_path)
