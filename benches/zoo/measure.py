"""Does a model use its loop: bits per byte by depth, and how far the state still moves at each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benches.zoo.chains import QUESTION_LENGTH, marked
from loopq.errors import ConfigError
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.stepwise import single_steps

Tokens = np.ndarray[Any, np.dtype[np.int64]]
BATCH = 32


def rows_of(text: bytes, n_sequences: int, seq_len: int) -> Tokens:
    """Cut a text into consecutive rows of byte values: int64 (n_sequences, seq_len).

    Raises
    ------
    ConfigError
        If the text is too short.
    """
    if len(text) < n_sequences * seq_len:
        raise ConfigError(f"the text has {len(text)} bytes, {n_sequences} rows of {seq_len} need more")
    flat = np.frombuffer(text, dtype=np.uint8, count=n_sequences * seq_len)
    return flat.reshape(n_sequences, seq_len).astype(np.int64)


def _batches(ids: Tokens, seed: int, size: int) -> Iterator[Batch]:
    for first in range(0, len(ids), size):
        part = torch.from_numpy(ids[first : first + size])
        yield Batch(part, tuple(range(first, first + len(part))), seed)


@torch.no_grad()
def bits(
    system: LoopedSystem, ids: Tokens, targets: Tokens, n_steps: int, seed: int = 0, size: int = BATCH
) -> float:
    """Return the mean bits that the last positions of a rollout spend on their targets.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    ids : int64 array (n_sequences, n_tokens)
        Prompts.
    targets : int64 array (n_sequences, n)
        What the last ``n`` positions are to predict.
    n_steps : int
        Depth.
    seed : int
        Seed of the start states; row ``i`` has the same start state in every call.
    size : int
        Rows at a time; the result does not depend on it beyond rounding.

    Notes
    -----
    ``-(1/n) sum log2 p(target | tokens before)``, logits in float32, sum in float64.
    """
    total = 0.0
    for batch in _batches(ids, seed, size):
        logits = system.rollout(batch, n_steps)[:, -targets.shape[1] :]
        wanted = torch.from_numpy(targets[list(batch.prompts)])
        total += float(F.cross_entropy(logits.flatten(0, 1).double(), wanted.flatten(), reduction="sum"))
    return total / targets.size / math.log(2.0)


def bits_per_byte(
    system: LoopedSystem, rows: Tokens, n_steps: int, seed: int = 0, size: int = BATCH
) -> float:
    """Return the mean bits spent on a byte of text, the first of each row given; see `bits`."""
    return bits(system, rows[:, :-1], rows[:, 1:], n_steps, seed, size)


def bits_per_answer(system: LoopedSystem, rows: Tokens, n_steps: int) -> float:
    """Return the mean bits spent on the letter that full depth reaches, after `n_steps` passes over the question.

    Parameters
    ----------
    rows : int64 array (n_sequences, `benches.zoo.chains.CHAIN_LENGTH`)
        As `benches.zoo.chains.chains` gives them.
    system, n_steps
        As in `bits`.
    """
    model = system.model
    ids = marked(rows[:, :QUESTION_LENGTH], rows[:, :0], model.start_latent_id, model.end_latent_id)
    hop = QUESTION_LENGTH + system.n_steps - 1
    return bits(system, ids, rows[:, hop : hop + 1], n_steps)


@torch.no_grad()
def state_movement(system: LoopedSystem, rows: Tokens, n_steps: int, seed: int = 0) -> list[float]:
    """Return, for every step ``t``, the mean of ``||s_{t+1} - s_t|| / ||s_t||`` over all positions of text."""
    (batch,) = _batches(rows[:, :-1], seed, len(rows))
    steps = single_steps(system)
    embedding = steps.embed(batch)
    states = [steps.initial_state(batch, embedding)]
    for t in range(steps.n_updates(n_steps)):
        states.append(steps.step(states[-1], embedding, t, n_steps))
    return movement(states)


@torch.no_grad()
def thought_movement(system: LoopedSystem, rows: Tokens, n_steps: int) -> list[float]:
    """Return `state_movement` of the thoughts that stand at the latents between question and answer."""
    model = system.model
    ids = marked(
        rows[:, :QUESTION_LENGTH], rows[:, :0], model.start_latent_id, model.end_latent_id,
        n_steps - 1, model.latent_token_id,
    )  # fmt: skip
    embeds = model(torch.from_numpy(ids)).inputs_embeds
    return movement(embeds[:, QUESTION_LENGTH + 1 : -1].unbind(1))


def movement(states: Sequence[Tensor]) -> list[float]:
    """Return the mean over positions of ``||s_{t+1} - s_t|| / ||s_t||`` for consecutive states (..., d)."""
    return [float(((b - a).norm(dim=-1) / a.norm(dim=-1)).double().mean()) for a, b in pairwise(states)]
