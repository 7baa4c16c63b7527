"""One decoding step as a graph: the device's operations are recorded once and replayed for each token.

A replay reads and writes the addresses of the recording. So the token and its noise are in buffers, and keys, values
and the number of tokens are in tensors of fixed size: those of `loopq.systems.fixed`, or of transformers' static cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from loopq.errors import ConfigError, require
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import extended

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.systems.fixed import FixedCached  # lazy: loopq imports without torch

Step: TypeAlias = "Callable[[], Tensor]"
#: Takes a step, and what undoes it. Returns what repeats its operations, and the tensor that then has the result.
Record: TypeAlias = "Callable[[Step, Callable[[], Any]], tuple[Callable[[], Any], Tensor]]"


def _capture(step: Step, undo: Callable[[], Any]) -> tuple[Callable[[], Any], Tensor]:
    """Record a step as a CUDA graph."""
    torch = require("torch")
    # Libraries allocate and choose algorithms at the first calls, which a recording forbids.
    device = step().device
    undo()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
            undo()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = step()
    return graph.replay, logits


RECORDERS: dict[str, Record] = {"cuda": _capture}


class _Own:
    """Texts of a `FixedCached` system. They share a cache, and the noise of a token is an input of its step."""

    def __init__(self, system: FixedCached, n_steps: int, n_tokens: int) -> None:
        self._system, self._n_steps, self._n_tokens = system, n_steps, n_tokens
        self._cache = system.new_cache()
        self._noise: Tensor | None = None

    def ready(self, n: int, n_seen: int) -> tuple[int, bool]:
        """Make room for a text. Return its number of tokens in the cache, and whether tensors moved."""
        expected = n + self._n_tokens if n_seen == 0 or n > self._cache.room else n
        return n_seen, self._system.reserve(
            self._cache, max(n, min(expected, self._system.n_positions or expected))
        )

    def run(self, batch: Batch, n_seen: int) -> Tensor:
        """Logits of the tokens from `n_seen` on."""
        return extended(self._system, batch, self._n_steps, n_seen, self._cache)[0]

    def step(self, batch: Batch, token: Tensor) -> Tensor:
        """Logits of a token at the position that the cache's tensor holds."""
        return self._system.continued(token, self._noise, self._n_steps, self._cache)

    def give(self, batch: Batch, n_seen: int) -> None:
        """Put the token's noise where the step reads it."""
        noise = self._system.noise(batch, n_seen)
        if noise is not None:
            self._noise = noise.clone() if self._noise is None else self._noise.copy_(noise)

    def overwritten(self) -> list[Tensor]:
        """The number of tokens."""
        return [self._cache.length]


class _Moved:
    """A text whose first tokens run in the model's own cache. Its contents then move to one of fixed size."""

    def __init__(self, system: LoopedSystem, n_steps: int, n_tokens: int) -> None:
        self._system, self._n_steps, self._n_tokens = system, n_steps, n_tokens
        self._room = 0
        self._cache: Any = None

    def ready(self, n: int, n_seen: int) -> tuple[int, bool]:
        """Begin anew with a new text, and with one that does not fit."""
        return (n_seen, False) if n_seen and n <= self._room else (0, True)

    def run(self, batch: Batch, n_seen: int) -> Tensor:
        """Logits of the tokens from `n_seen` on."""
        cache = self._cache if n_seen else None
        logits, cache = extended(self._system, batch, self._n_steps, n_seen, cache)
        if n_seen == 0:
            from loopq.systems import fixed  # lazy: loopq imports without torch

            n = batch.input_ids.shape[1]
            self._room = -(-(n + self._n_tokens) // fixed.BLOCK) * fixed.BLOCK
            self._cache = _fixed(cache, self._room - n)
        return logits

    def step(self, batch: Batch, token: Tensor) -> Tensor:
        """Logits of a token after those in the cache."""
        one = replace(batch, input_ids=token)
        return extended(self._system, one, self._n_steps, 0, self._cache)[0]

    def give(self, batch: Batch, n_seen: int) -> None:
        """These systems draw no noise."""

    def overwritten(self) -> list[Tensor]:
        """Numbers of tokens, and states that are not kept for each token."""
        caches = self._cache if isinstance(self._cache, list) else [self._cache]
        layers = [vars(layer) for part in caches for layer in part.layers]
        tables = [layer.get(name, {}) for layer in layers for name in ("conv_states", "recurrent_states")]
        numbers = (layer.get("cumulative_length") for layer in layers)
        return [v for v in (*numbers, *(v for t in tables for v in t.values())) if v is not None]


class Graph:
    """Logits of growing texts, one recorded step for each token.

    Several tokens at once are launched one by one. A text that outgrows the cache is recorded anew.

    Parameters
    ----------
    system : LoopedSystem
        Its device has an entry in `RECORDERS`.
    n_steps : int
        Depth.
    n_tokens : int
        Tokens that are expected after the first ones.
    """

    def __init__(self, system: LoopedSystem, n_steps: int, n_tokens: int) -> None:
        from loopq.systems.fixed import FixedCached  # lazy: loopq imports without torch

        self._text: _Own | _Moved
        if isinstance(system, FixedCached):
            self._text = _Own(system, n_steps, n_tokens)
        else:
            self._text = _Moved(system, n_steps, n_tokens)
        self._record = RECORDERS[system.device.type]
        self._token = system.to_device(require("torch").tensor([[0]]))
        self._replay: Callable[[], Any] | None = None

    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        """Logits (vocabulary) after a batch of one prompt whose first `n_seen` tokens were in the last call.

        Raises
        ------
        ConfigError
            If the model's cache changes its size with each token, or the model has fewer positions.
        """
        n = batch.input_ids.shape[1]
        n_seen, moved = self._text.ready(n, n_seen)
        if moved:
            self._replay = None
        if n_seen == 0 or n - n_seen > 1:
            return self._text.run(batch, n_seen)[0, -1]
        self._token.copy_(batch.input_ids[:, n_seen:])
        self._text.give(batch, n_seen)
        if self._replay is None:
            kept = [(part, part.clone()) for part in self._text.overwritten()]
            self._replay, self._logits = self._record(
                lambda: self._text.step(batch, self._token), lambda: [part.copy_(old) for part, old in kept]
            )
        self._replay()
        return self._logits.clone()[0, -1]


def _fixed(cache: Any, room: int) -> Any:
    """The same cache with room for more tokens, in tensors that stay where they are."""
    if isinstance(cache, list):
        return [_fixed(part, room) for part in cache]
    caches = require("transformers").cache_utils
    if type(cache) is not caches.DynamicCache:
        raise ConfigError(f"no graph: {type(cache).__name__} changes its size")
    layers = []
    for layer in cache.layers:
        fixed, states = layer, isinstance(layer, caches.LinearAttentionLayer)
        if hasattr(layer, "keys"):
            kind = caches.LinearAttentionAndStaticFullAttentionLayer if states else caches.StaticLayer
            fixed = kind(layer.get_seq_length() + room)
        if fixed is not layer and states:
            vars(fixed).update({name: vars(layer)[name] for name in vars(caches.LinearAttentionLayer())})
        if fixed is not layer and layer.is_initialized:
            # A sliding window has dropped its first tokens, which no later token reads.
            fixed.cumulative_length.add_(layer.get_seq_length() - layer.keys.shape[-2])
            fixed.update(layer.keys, layer.values)
        layers.append(fixed)
    return caches.Cache(layers=layers)
