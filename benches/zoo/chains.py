"""A task that needs one pass per hop: follow a map of letters, for models that think in latents."""

from __future__ import annotations

from typing import Any

import numpy as np

from benches.zoo.models.coconut import CoconutConfig
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import register_prompts
from loopq.models.load import LoadedModel

Ids = np.ndarray[Any, np.dtype[np.int64]]

# Training draws its seeds below 2**62; the card measures on 2**62.
MEASURING_SEED = 2**62
_TABLE_SEED = MEASURING_SEED + 1

N_LETTERS = 10
QUESTION_LENGTH = 3 * N_LETTERS + 2
MAX_HOPS = 12
CHAIN_LENGTH = QUESTION_LENGTH + MAX_HOPS


def chains(n_sequences: int, seed: int) -> Ids:
    """Make questions such as ``bd ac .. ?a`` with the letters that each further hop leads to.

    Parameters
    ----------
    n_sequences : int
        Rows.
    seed : int
        The same seed gives the same rows.

    Returns
    -------
    int64 array (n_sequences, CHAIN_LENGTH)
        Byte values. The question lists one random cycle through all letters as pairs in random order and
        names a letter; behind it stand the letters after 1, 2, .. `MAX_HOPS` hops.
    """
    rng = np.random.default_rng(seed)
    out = np.empty((n_sequences, CHAIN_LENGTH), dtype=np.int64)
    for row in out:
        cycle = rng.permutation(N_LETTERS) + ord("a")
        follow = {int(a): int(b) for a, b in zip(cycle, np.roll(cycle, -1), strict=True)}
        pairs = [x for a in rng.permutation(cycle) for x in (int(a), follow[int(a)], ord(" "))]
        hops = [int(cycle[0])]
        for _ in range(MAX_HOPS):
            hops.append(follow[hops[-1]])
        row[:] = [*pairs, ord("?"), *hops]
    return out


def marked(
    question: Ids, answer: Ids, start_id: int, end_id: int, latents: int = 0, latent_id: int = 0
) -> Ids:
    """Put the start token, `latents` latent tokens and the end token between question and answer."""
    rows = len(question)
    middle = np.full((rows, latents + 2), latent_id, dtype=np.int64)
    middle[:, 0], middle[:, -1] = start_id, end_id
    return np.concatenate([question, middle, answer], axis=1)


def prompts(loaded: LoadedModel, use: str, n_prompts: int, draw: int) -> TokenSet:
    """Give questions with the letters from the one that full depth reaches on, as the model was trained to answer."""
    model = loaded.model
    rows = chains(n_prompts, _TABLE_SEED + (2 * draw if use == "calibration" else 1))
    answer = rows[:, QUESTION_LENGTH + loaded.system.n_steps - 1 :]
    ids = marked(rows[:, :QUESTION_LENGTH], answer, model.start_latent_id, model.end_latent_id)
    # The end token, behind question and start token, predicts the answer's first letter.
    return TokenSet(tuple(ids), "chains of letters", "prompts", scored_from=QUESTION_LENGTH + 1)


register_prompts(CoconutConfig.model_type, prompts)
