"""One decoding step as a graph: the device's operations are recorded once and replayed for each token.

A replay reads and writes the addresses of the recording. So the token is in a buffer, and transformers' static cache
holds keys, values and the number of tokens in tensors of fixed size.
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

#: A cache grows by whole blocks of this many tokens, because each growth needs a new recording.
_BLOCK = 256
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


class Graph:
    """Logits of growing texts, one recorded step for each token.

    The first tokens of a text run in the model's own cache. Its contents then move to one of fixed size, and the step
    is recorded anew.

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
        self._system, self._n_steps, self._n_tokens = system, n_steps, n_tokens
        self._record = RECORDERS[system.device.type]
        self._token = system.to_device(require("torch").tensor([[0]]))
        self._room = 0
        self._cache: Any = None
        self._replay: Callable[[], Any] | None = None

    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        """Logits (vocabulary) after a batch of one prompt whose first `n_seen` tokens were in the last call.

        Raises
        ------
        ConfigError
            If the model's cache changes its size with each token.
        """
        n = batch.input_ids.shape[1]
        ids = batch.input_ids[:, n_seen:].to(self._token.device)
        if n_seen == 0 or n > self._room:
            logits, cache = self._run(batch, None)
            self._room = -(-(n + self._n_tokens) // _BLOCK) * _BLOCK
            self._cache, self._replay = _fixed(cache, self._room - n), None
        elif n - n_seen > 1:
            logits, _ = self._run(replace(batch, input_ids=ids), self._cache)
        else:
            self._token.copy_(ids)
            if self._replay is None:
                step = replace(batch, input_ids=self._token)
                kept = [(part, part.clone()) for part in _overwritten(self._cache)]
                self._replay, self._logits = self._record(
                    lambda: self._run(step, self._cache)[0], lambda: [part.copy_(old) for part, old in kept]
                )
            self._replay()
            logits = self._logits.clone()
        return logits[0, -1]

    def _run(self, batch: Batch, cache: Any) -> tuple[Tensor, Any]:
        return extended(self._system, batch, self._n_steps, 0, cache)


def _overwritten(cache: Any) -> list[Tensor]:
    """Numbers of tokens, and states that are not kept for each token: what a step replaces."""
    layers = [
        vars(layer) for part in (cache if isinstance(cache, list) else [cache]) for layer in part.layers
    ]
    tables = [layer.get(name, {}) for layer in layers for name in ("conv_states", "recurrent_states")]
    values = [*(layer.get("cumulative_length") for layer in layers), *(v for t in tables for v in t.values())]
    return [v for v in values if v is not None]


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
