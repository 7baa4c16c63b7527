"""A model with its own weights and with others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopq.calibrate.data import from_ids
from loopq.evaluate.compare import compare
from loopq.systems.base import Batch


def test_comparison_of_a_model_with_itself(loaded, tokens):
    own = {p.name: loaded.system.parameter(p).detach().numpy() for p in loaded.system.shared_parameters(3)}
    reference, same = compare(loaded.system, {"same": own}, tokens, seeds=(0, 1), batch_size=4)
    assert np.array_equal(same.kl, np.zeros((2, 10)))
    assert np.array_equal(same.agreement, np.ones((2, 10)))
    assert np.array_equal(same.nll, reference.nll)
    assert not np.array_equal(reference.nll[0], reference.nll[1])
    other = {n: w + 0.05 * np.sign(w) for n, w in own.items()}
    worse = compare(loaded.system, {"other": other}, tokens)[1]
    assert (worse.kl > 0).all()


def test_bits_per_byte_divide_by_the_bytes_of_the_tokens_that_are_predicted(loaded, tokens):
    """Tokens of even id stand for three bytes, the others for one."""
    few = dataclasses.replace(tokens.take(0, 2), scored_from=2)
    found = compare(loaded.system, {}, few, count_bytes=lambda ids: int(np.where(ids % 2, 1, 3).sum()))
    predicted = np.concatenate([ids[3:] for ids in few.sequences])
    width = np.where(predicted % 2, 1, 3).mean()
    assert found[0].bytes_per_token == width
    assert found[0].bits_per_byte == pytest.approx(found[0].nll.mean() / np.log(2.0) / width)
    assert compare(loaded.system, {}, few)[0].bits_per_byte is None
    assert compare(loaded.system, {}, few, count_bytes=loaded.count_bytes)[0].bytes_per_token == 1.0


def test_answers_are_right_as_a_whole_and_scored_behind_the_question(loaded, tokens):
    """Prompts are filled with what the model itself predicts, in one of them all but the first token of the answer."""
    ids = np.stack(tokens.take(0, 3).sequences)
    for at in range(20, 24):
        batch = Batch(torch.from_numpy(ids), (0, 1, 2), 0)
        logits = loaded.system.rollout(batch, loaded.system.n_steps).detach().numpy()
        ids[:, at] = logits[:, at - 1].argmax(-1) + (at == 20) * np.array([0, 1, 0])
    text = from_ids(ids)
    task = dataclasses.replace(text, scored_from=19)
    few = dataclasses.replace(text, scored_from=20)
    assert [compare(loaded.system, {}, t)[0].answered[0].tolist() for t in (text, task, few)] == [
        [1, 1, 1], [1, 0, 1], [1, 1, 1],
    ]  # fmt: skip
    logp = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    expected = [-np.mean([logp[p, at - 1, ids[p, at]] for at in range(20, 24)]) for p in range(3)]
    assert compare(loaded.system, {}, task)[0].nll[0] == pytest.approx(expected, rel=1e-5)
