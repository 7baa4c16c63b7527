"""Logits and caches in the outputs of models' forwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Names of a cache in arguments and outputs: transformers from 5.24 on, before it, and its recurrences before it.
_CACHES = ("cache", "past_key_values", "cache_params")


def logits_of(output: Any) -> Tensor:
    """Take the logits out of the output of a model's forward.

    Raises
    ------
    SystemContractError
        If the model kept a cache, so its next call would continue this rollout, or gave no logits.
    """
    if cache_of(output) is not None:
        raise SystemContractError(
            f"{type(output).__name__}: the forward kept a cache; rollouts run with use_cache=False"
        )
    return _logits(output)


def cache_of(output: Any) -> Any:
    """Take the cache out of a forward's output. None if it kept none."""
    name = next((name for name in _CACHES if hasattr(output, name)), "")
    return getattr(output, name, None)


def cache_name(forward: Callable[..., Any]) -> str | None:
    """Name of a forward's cache argument. None if it has none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def cached(output: Any) -> tuple[Tensor, Any]:
    """Take the logits and the cache out of the output of a forward with ``use_cache=True``.

    Raises
    ------
    SystemContractError
        If the model kept no cache, or gave no logits.
    """
    cache = cache_of(output)
    if cache is None:
        raise SystemContractError(f"{type(output).__name__}: the forward kept no cache")
    return _logits(output), cache


def past(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Arguments of a forward that starts or continues a cache."""
    return (
        {"use_cache": True} if cache is None else {"use_cache": True, str(cache_name(module.forward)): cache}
    )


def _logits(output: Any) -> Tensor:
    logits = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
    if isinstance(logits, tuple):
        logits = logits[0]
    if not hasattr(logits, "shape") or logits.ndim != 3:
        raise SystemContractError(
            f"{type(output).__name__}: no logits (n_prompts, n_tokens, vocabulary) in it"
        )
    tensor: Tensor = logits
    return tensor
