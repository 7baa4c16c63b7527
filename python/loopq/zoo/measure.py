"""Does a model use its loop: bits per byte by depth, and how far the state still moves at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loopq.zoo._model import ZooModel

Tokens = np.ndarray[Any, np.dtype[np.int64]]


def _chunks(tokens: Tokens, rows: int) -> Iterable[tuple[int, Tensor]]:
    for first in range(0, len(tokens), rows):
        yield first, torch.from_numpy(tokens[first : first + rows])


@torch.no_grad()
def bits_per_byte(
    model: ZooModel, tokens: Tokens, num_steps: int | None = None, seed: int = 0, batch: int = 32
) -> float:
    """Return the mean bits the model spends on a byte.

    Parameters
    ----------
    model : ZooModel
        In eval mode.
    tokens : int64 array (n_sequences, seq_len)
        As `loopq.zoo.batches` gives them; the first byte of a row is given, the others are predicted.
    num_steps : int, optional
        Depth of the rollout.
    seed : int
        Seed of the start states; row ``i`` has the same start state in every call.
    batch : int
        Rows at a time; the result does not depend on it beyond rounding.

    Notes
    -----
    ``-(1/n) sum log2 p(byte | bytes before)``, logits in float32, sum in float64.
    """
    total, count = 0.0, 0
    for first, ids in _chunks(tokens, batch):
        logits, targets = model.scored(ids, num_steps, seed, first)
        nats = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum")
        total += float(nats)
        count += targets.numel()
    return total / count / math.log(2.0)


@torch.no_grad()
def bits_by_depth(
    model: ZooModel, tokens: Tokens, depths: Sequence[int], seed: int = 0, batch: int = 32
) -> dict[int, float]:
    """Return `bits_per_byte` at every depth, from one rollout to the deepest where the model allows it.

    Parameters
    ----------
    depths : sequence of int
        Depths to read out.
    model, tokens, seed, batch
        As in `bits_per_byte`.
    """
    if not model.prefix_rollouts:
        return {n: bits_per_byte(model, tokens, n, seed, batch) for n in depths}
    totals = dict.fromkeys(depths, 0.0)
    for first, ids in _chunks(tokens, batch):
        states = model.states(ids[:, :-1], num_steps=max(depths), seed=seed, first_row=first)
        for n in depths:
            logits = model.predict_from_latents(states[model.n_updates(n)])
            nats = F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="sum")
            totals[n] += float(nats)
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    return {n: total / count / math.log(2.0) for n, total in totals.items()}


@torch.no_grad()
def state_movement(
    model: ZooModel, tokens: Tokens, num_steps: int | None = None, seed: int = 0, batch: int = 32
) -> list[float]:
    """Return, for every step ``t``, the mean of ``||s_{t+1} - s_t|| / ||s_t||`` over all positions.

    Parameters
    ----------
    model, tokens, num_steps, seed, batch
        As in `bits_per_byte`.
    """
    sums: list[float] = []
    count = 0
    for first, ids in _chunks(tokens, batch):
        states = model.states(ids[:, :-1], num_steps=num_steps, seed=seed, first_row=first)
        moves = [float(((b - a).norm(dim=-1) / a.norm(dim=-1)).double().sum()) for a, b in pairwise(states)]
        sums = [x + y for x, y in zip(sums or [0.0] * len(moves), moves, strict=True)]
        count += states[0].shape[0] * states[0].shape[1]
    return [x / count for x in sums]
