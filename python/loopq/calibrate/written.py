"""Calibration text that the model writes itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError, LoopqError, model_code
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Continues

if TYPE_CHECKING:
    from torch import Tensor

#: Prompts that are written together.
_TOGETHER = 16


def written(
    system: LoopedSystem, first: Sequence[int], known: NDArray[np.int64], seq_len: int, n_prompts: int
) -> TokenSet:
    """Let a model write prompts by sampling from its own distribution. Every call gives the same result.

    Parameters
    ----------
    system : LoopedSystem
        Adapter of a causal model. It runs at its own depth.
    first : sequence of int
        Special tokens at the start of every prompt. Without any, the first token is drawn from `known`.
    known : ndarray, int64, 1-D
        Token ids that a text can hold.
    seq_len, n_prompts : int
        Tokens of a prompt, and number of prompts.

    Raises
    ------
    ConfigError
        The model returns hidden states.
    """
    import torch  # lazy: loopq imports without torch

    if system.output != "logits":
        raise ConfigError(
            "calibration 'self': the model gives hidden states, so it writes no text; give a file"
        )
    generator = torch.Generator().manual_seed(0)
    chosen = torch.from_numpy(known)
    prompts: list[NDArray[np.int64]] = []
    for start in range(0, n_prompts, _TOGETHER):
        numbers = tuple(range(start, min(start + _TOGETHER, n_prompts)))
        drawn = chosen[torch.randint(len(known), (len(numbers), 1), generator=generator)]
        ids = torch.tensor([list(first)] * len(numbers)) if first else drawn
        write = _Writer(system)
        with torch.no_grad(), model_code(f"text that the model writes, prompt {start}"):
            while ids.shape[1] < seq_len:
                logits = write(Batch(ids, numbers, by_token=True))
                shares = logits[:, chosen.to(logits.device)].softmax(-1).cpu()
                following = chosen[torch.multinomial(shares, 1, generator=generator)]
                ids = torch.cat([ids, following], dim=1)
        prompts += list(ids.numpy())
    return TokenSet(tuple(prompts), "text that the model wrote", "prompts")


class _Writer:
    """Logits after the last token. It uses the model's cache if there is one, otherwise whole rollouts."""

    def __init__(self, system: LoopedSystem) -> None:
        self._system, self._n_steps = system, system.n_steps
        self._cache: Any = None
        self._cached = system if isinstance(system, Continues) else None

    def __call__(self, batch: Batch) -> Tensor:
        extended = None
        if self._cached is not None:
            n_seen = batch.input_ids.shape[1] - 1 if self._cache is not None else 0
            with contextlib.suppress(LoopqError):  # A class without a cache says so.
                extended = self._cached.extend(batch, self._n_steps, n_seen, self._cache)
        if extended is None:
            self._cached = None
            return self._system.rollout(batch, self._n_steps)[:, -1].float()
        logits, self._cache = extended
        return logits[:, -1].float()
