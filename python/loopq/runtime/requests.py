"""Task requests to a model: log-likelihoods and texts, defined as in lm-evaluation-harness, shared with its plugin."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.errors import NonFiniteError, model_code, require
from loopq.models.load import LoadedModel
from loopq.models.text import decode
from loopq.runtime.generate import Decoder, Generation, end_ids, generate
from loopq.settings.execution import Execution
from loopq.systems.base import Batch
from loopq.systems.capabilities import marked

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens of the longest input where the model's configuration does not say, as in lm-evaluation-harness.
_LONGEST = 2048
#: Text before a request for a model without such a token: a line's end.
_NEWLINE = 10

#: Token ids of a context, which has one at least, and of what follows it.
Request = tuple[Sequence[int], Sequence[int]]


def longest_input(loaded: LoadedModel) -> int:
    """Longest input of a model in tokens: its positions, or 2048 where its configuration gives none."""
    return loaded.context_length or _LONGEST


def prefix_id(loaded: LoadedModel) -> int:
    """Token in place of an empty context: the tokenizer's first token, one that ends a text, or 10."""
    bos = getattr(loaded.tokenizer, "bos_token_id", None)
    return next((i for i in (bos, *sorted(end_ids(loaded))) if i is not None), _NEWLINE)


def encode_pair(loaded: LoadedModel, context: str, continuation: str) -> Request:
    """Encode both as one text and split it where the context's tokens end. Blanks between go to the continuation.

    The token of `prefix_id` replaces an empty context. A continuation that begins with it needs no other.
    """
    whole, first = list(loaded.encode(context + continuation)), list(loaded.encode(context.rstrip()))
    if first:
        return first, whole[len(first) :]
    prefix = prefix_id(loaded)
    return ([prefix], whole) if whole[:1] != [prefix] else (whole[:1], whole[1:])


def windows_of(context: Sequence[int], continuation: Sequence[int], size: int) -> list[tuple[list[int], int]]:
    """Cut one request into windows of at most `size` tokens, each with the number of scored tokens at its end.

    Every token of the continuation is scored once. The context is cut at its left. A continuation of `size` tokens or
    more is cut into windows as full as possible, which overlap by at least one token.
    """
    ids = [*context, *continuation]
    if len(continuation) < size:
        return [(ids[-size:], len(continuation))] if continuation else []
    windows, at = [], len(context)
    while at < len(ids):
        end = min(at + size - 1, len(ids))
        windows.append((ids[max(0, end - size) : end], end - at))
        at = end
    return windows


def log_likelihoods(
    loaded: LoadedModel,
    requests: Sequence[Request],
    *,
    n_steps: int | None = None,
    longest: int | None = None,
    execution: Execution | None = None,
    label: str = "likelihood",
) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation after its context, and whether it is the greedy one.

    Parameters
    ----------
    loaded : LoadedModel
        A model with logits.
    requests : sequence of (context ids, continuation ids)
        As from `encode_pair`. A whole text is scored after the token of `prefix_id`.
    n_steps, longest : int, optional
        Depth, and tokens of the longest input (`longest_input`). A window has one more, which is only predicted.
    execution : Execution, optional
        Seed of the initial states. All requests use the states of prompt 0, token by token, in batches of equal length,
        so neither order nor batches change a score.

    Returns
    -------
    list of (float, bool)
        Sum of log p(token | tokens before it) over the continuation in nats. The flag tells whether each token is the
        most probable one. An empty continuation gives (0, True). Arithmetic is float64.

    Raises
    ------
    NonFiniteError
        The logits hold NaN.
    """
    torch = require("torch")
    system, how = loaded.system, execution or Execution()
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    size = (longest or longest_input(loaded)) + 1
    windows = [(i, *window) for i, request in enumerate(requests) for window in windows_of(*request, size)]
    windows.sort(key=lambda w: len(w[1]))
    scores = [(0.0, True)] * len(requests)
    if not windows:
        return scores
    tokens = TokenSet(tuple(np.array(ids, dtype=np.int64) for _, ids, _ in windows), "requests", "prompts")
    how.progress.start(label, len(windows), "texts")
    for numbers in tokens.plan(how.batch_size):
        ids = torch.from_numpy(np.stack([tokens.sequences[k] for k in numbers]))
        with torch.no_grad(), model_code(f"rollout of {ids.shape[1] - 1} tokens"):
            logits = system.rollout(Batch(ids[:, :-1], (0,) * len(numbers), how.seed, by_token=True), depth)
        for row, (i, _, n) in enumerate(windows[number] for number in numbers):
            value, greedy = _scored(logits[row, -n:], system.to_device(ids[row, -n:]))
            scores[i] = scores[i][0] + value, scores[i][1] and greedy
            if math.isnan(value):
                raise NonFiniteError(f"request {i}: the log-likelihood is not a number: the logits hold NaN")
        how.progress.advance(len(numbers))
    how.progress.stop()
    return scores


def _scored(logits: Tensor, target: Tensor) -> tuple[float, bool]:
    """Log-likelihood of tokens, and whether each is the most probable one."""
    logp = logits.double().log_softmax(-1)
    return float(logp.gather(-1, target[:, None]).sum()), bool((logp.argmax(-1) == target).all())


def n_generated(n_tokens: int, longest: int) -> int:
    """Tokens to generate for a request of `n_tokens`: at most half of the longest input."""
    return max(1, min(n_tokens, longest // 2))


def generate_until(
    loaded: LoadedModel,
    context: str,
    decoder: Decoder,
    settings: Generation,
    stops: Sequence[str],
    longest: int | None = None,
) -> str:
    """Generate the text after a context, before the first stop string or up to a number of tokens.

    The context is cut at its left if both together exceed the longest input (`longest_input` by default). The number of
    tokens is limited by `n_generated`.
    """
    longest = longest or longest_input(loaded)
    settings = dataclasses.replace(settings, n_tokens=n_generated(settings.n_tokens, longest))
    prompt = list(loaded.encode(context)) or [prefix_id(loaded)]
    prompt = marked(loaded.system, prompt[-max(1, longest - settings.n_tokens) :])
    ids: list[int] = []
    for token in generate(loaded, prompt, decoder, settings):
        ids.append(token)
        text = decode(loaded, ids)
        if any(stop in text for stop in stops):
            break
    text = decode(loaded, ids)
    return text[: min([len(text), *(text.index(stop) for stop in stops if stop in text)])]
