"""How requests are encoded, cut and scored, against likelihoods worked out in the test."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import NonFiniteError
from loopq.models.load import load_model
from loopq.runtime.requests import encode_pair, log_likelihoods, longest_input, prefix_id, windows_of
from loopq.settings.execution import Execution
from loopq.systems.base import Batch


@pytest.fixture(scope="module")
def loaded():
    torch.set_num_threads(1)
    return load_model("huginn_small")


def test_every_token_of_a_continuation_is_scored_once() -> None:
    ids = list(range(100))
    assert windows_of(ids[:5], ids[5:8], 16) == [(ids[:8], 3)]
    assert windows_of(ids[:30], ids[30:34], 16) == [(ids[18:34], 4)]
    assert windows_of([7], [], 16) == []
    cut = windows_of([100], ids, 16)
    scored = [t for window, n in cut for t in window[-n:]]
    assert scored == ids
    assert all(len(window) <= 16 and n < len(window) for window, n in cut)


def test_whole_texts_are_cut_as_the_harness_cuts_them() -> None:
    # Inputs of 4 tokens: first the token before the text and 4 of the text. Then 4 tokens after one. Then 2
    # after 3 that fill the input.
    assert windows_of([99], range(10), 5) == [
        ([99, 0, 1, 2, 3], 4),
        ([3, 4, 5, 6, 7], 4),
        ([5, 6, 7, 8, 9], 2),
    ]


def test_blanks_join_the_continuation_and_no_context_is_a_token(loaded) -> None:
    context, answer = encode_pair(loaded, "The cat ", "sat")
    assert (bytes(context), bytes(answer)) == (b"The cat", b" sat")
    assert prefix_id(loaded) == 10
    assert encode_pair(loaded, "", "It") == ([10], list(b"It"))
    assert encode_pair(loaded, " ", "It") == ([10], list(b" It"))
    # The text begins with that token already: it is the context.
    assert encode_pair(loaded, "", "\nIt") == ([10], list(b"It"))
    assert longest_input(loaded) == loaded.context_length == 128


def test_order_batches_and_windows_do_not_change_a_likelihood(loaded) -> None:
    text = list(b"It was a bright cold day in April")
    requests = [([10], text), (text[:5], text[5:9]), (text[:6], text[6:9]), ([10], [])]
    scores = log_likelihoods(loaded, requests, n_steps=3, execution=Execution(batch_size=4))
    again = log_likelihoods(loaded, requests[::-1], n_steps=3, execution=Execution(batch_size=1))[::-1]
    assert [v for v, _ in scores] == pytest.approx([v for v, _ in again], rel=1e-6)
    assert scores[3] == (0.0, True)
    batch = Batch(torch.tensor([[10, *text[:-1]]]), (0,), by_token=True)
    logp = loaded.system.rollout(batch, 3)[0].double().log_softmax(-1)
    assert scores[0][0] == pytest.approx(float(logp.gather(-1, torch.tensor(text)[:, None]).sum()), rel=1e-6)
    # Cut in windows of 8: less context, so the text is less likely.
    (cut,) = log_likelihoods(loaded, requests[:1], n_steps=3, longest=8)
    assert cut[0] < scores[0][0]


def test_logits_that_are_none_are_an_error(loaded, monkeypatch) -> None:
    plain = loaded.system.rollout
    monkeypatch.setattr(type(loaded.system), "rollout", lambda self, batch, n: plain(batch, n) * float("nan"))
    with pytest.raises(NonFiniteError, match="request 0: the log-likelihood is not a number"):
        log_likelihoods(loaded, [([10], [65])])
