"""Text that a model writes itself, to calibrate it by what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError
from loopq.systems.base import Batch, LoopedSystem, model_code

if TYPE_CHECKING:
    from torch import Tensor

#: Prompts that are written together.
_TOGETHER = 16


def written(
    system: LoopedSystem, first: Sequence[int], known: NDArray[np.int64], seq_len: int, n_prompts: int
) -> TokenSet:
    """Let a model write prompts, each token drawn from its own distribution, the same at every call.

    Parameters
    ----------
    system : LoopedSystem
        Adapter of a causal model, run at its own depth.
    first : sequence of int
        Special tokens that every prompt begins with. Without any, the first token is drawn from `known`.
    known : ndarray, int64, 1-D
        Token ids that a text can hold.
    seq_len, n_prompts : int
        Tokens of a prompt, and prompts.

    Raises
    ------
    ConfigError
        The model gives hidden states.
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
        cache: Any = None
        with torch.no_grad(), model_code(f"text that the model writes, prompt {start}"):
            while ids.shape[1] < seq_len:
                logits, cache = _next(system, Batch(ids, numbers, by_token=True), cache)
                shares = logits[:, chosen.to(logits.device)].softmax(-1).cpu()
                following = chosen[torch.multinomial(shares, 1, generator=generator)]
                ids = torch.cat([ids, following], dim=1)
        prompts += list(ids.numpy())
    return TokenSet(tuple(prompts), "text that the model wrote", "prompts")


def _next(system: LoopedSystem, batch: Batch, cache: Any) -> tuple[Tensor, Any]:
    """Logits after the last token, by the model's cache where it has one."""
    n_seen = batch.input_ids.shape[1] - 1 if cache is not None else 0
    found = system.extend(batch, system.n_steps, n_seen, cache)
    logits, cache = found if found is not None else (system.rollout(batch, system.n_steps), None)
    return logits[:, -1].float(), cache
