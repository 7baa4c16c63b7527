"""A task that needs one pass per hop: follow a map of letters, for models that think in latents."""

from __future__ import annotations

from typing import Any

import numpy as np

N_LETTERS = 10
QUESTION_LENGTH = 3 * N_LETTERS + 2
MAX_HOPS = 12
CHAIN_LENGTH = QUESTION_LENGTH + MAX_HOPS


def chains(n_sequences: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
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
