"""Gradients of several prompts in turns: equal to those one by one, and a layer is read once for a visit of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopq.calibrate.data import TokenSet
from loopq.gradients.backward import Backward, draw_labels
from loopq.models.load import load_model
from loopq.models.stream import Stream
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig
from loopq.run.plan import Plan
from loopq.storage.model_files import source_of
from tests.support.exact_metric import Noted
from tests.support.vendors import inkling, tokens


def _gradients(
    folder: Path, at_once: int, n_draws: int = 1
) -> tuple[list[tuple[str, float]], list[int], int]:
    loaded = load_model(folder, memory=1)
    stream = source_of(loaded.model)
    assert isinstance(stream, Stream)
    reads: list[Any] = []
    inner = stream._read
    stream._read = lambda keys: reads.append(keys) or inner(keys)  # type: ignore[method-assign, func-returns-value]
    parameters = loaded.system.shared_parameters(3)
    tasks: tuple[Task, ...] = Plan.of(parameters, {p.name: p.name for p in parameters}, QuantConfig()).tasks
    side = Noted()
    prompts = TokenSet(tuple(tokens(3)), "test", "prompts")
    done = list(Backward(loaded.system, prompts, 3, n_draws, 0, at_once).run(side, tasks, 0, 3))
    return side.found, done, len(reads)


@pytest.mark.slow
def test_turns_give_the_gradients_of_one_prompt_after_the_other(tmp_path: Path) -> None:
    inkling().save_pretrained(tmp_path)
    alone, steps, n_alone = _gradients(tmp_path, 1)
    together, at_end, n_together = _gradients(tmp_path, 3)
    assert together == alone
    assert (steps, at_end) == ([1, 2, 3], [0, 0, 3])
    # Ten visits there and ten back, where the first layer is there already; and each prompt begins where another ended.
    assert (n_together, n_alone) == (19, 3 * 19 - 2)
    in_turns, between, _ = _gradients(tmp_path, 2)
    assert (in_turns, between) == (alone, [0, 2, 3])


@pytest.mark.slow
def test_several_draws_of_a_prompt_are_taken_in_turns(tmp_path: Path) -> None:
    inkling().save_pretrained(tmp_path)
    alone, _, _ = _gradients(tmp_path, 1, n_draws=2)
    together, at_end, _ = _gradients(tmp_path, 3, n_draws=2)
    assert together == alone
    assert at_end == [0, 0, 0, 0, 0, 3]


def test_an_error_in_a_turn_is_raised(tmp_path: Path) -> None:
    inkling().save_pretrained(tmp_path)
    loaded = load_model(tmp_path, memory=1)
    calls: list[Any] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("second prompt")

    loaded.model.model.layers[3].self_attn.register_forward_hook(fail)
    prompts = TokenSet(tuple(tokens(3)), "test", "prompts")
    with pytest.raises(MemoryError, match="second prompt"):
        list(Backward(loaded.system, prompts, 3, 1, 0, 3).run(Noted(), (), 0, 3))


def test_labels_have_the_probabilities_of_the_model() -> None:
    p = np.array([0.5, 0.0, 0.3, 0.2])
    logp = torch.from_numpy(np.log(np.broadcast_to(p + 1e-30, (40, 500, 4))).astype(np.float32))
    labels = draw_labels(logp, [0, 1]).numpy()
    assert labels.shape == (40, 500)
    np.testing.assert_allclose(np.bincount(labels.ravel(), minlength=4) / labels.size, p, atol=0.015)
    np.testing.assert_array_equal(draw_labels(logp, [0, 1]).numpy(), labels)
    assert (draw_labels(logp, [0, 2]).numpy() != labels).any()


def test_rounding_changes_few_labels() -> None:
    """No more than the total variation allows; inversion of the cumulative distribution changes many times that."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 100, 512)) * 2
    here, there = (
        torch.from_numpy(x).log_softmax(-1).float()
        for x in (logits, logits + 1e-2 * rng.normal(size=logits.shape))
    )
    p, q = (np.exp(x.double().numpy()) for x in (here, there))
    bound = np.abs(p - q).sum()
    changed = int((draw_labels(here, [3]) != draw_labels(there, [3])).sum())
    assert 0 < changed < bound + 4 * np.sqrt(bound)
    assert np.abs(p.cumsum(-1) - q.cumsum(-1)).sum() > 5 * bound
