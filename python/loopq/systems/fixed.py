"""A cache of fixed size for models of any class: keys and values stay where they are while a text grows.

Published caches of loops grow by concatenation, and some classes have none. A recorded step needs tensors that keep
their addresses (`loopq.runtime.graph`). A rollout calls its attentions in the same order every time, so the n-th call
of torch's `scaled_dot_product_attention` has the n-th slot of the cache, and the class need not know of it.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from loopq.errors import ConfigError, SystemContractError
from loopq.systems.base import Batch
from loopq.systems.outputs import cache_name
from loopq.systems.stepwise import StepwiseSystem

#: The cache grows by whole blocks of this many tokens, because each growth moves its tensors.
BLOCK = 256


class FixedCache:
    """Keys and values of each attention of a rollout, in tensors with room for later tokens.

    Parameters
    ----------
    device : torch.device
        Device of the model.

    Attributes
    ----------
    room : int
        Number of tokens that fit.
    length : int64 Tensor of shape ()
        Number of tokens in the cache, on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.room = 0
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.slots: list[tuple[Tensor, Tensor]] = []

    def reserve(self, n_tokens: int) -> bool:
        """Make room for this number of tokens. Return whether the tensors moved."""
        if n_tokens <= self.room:
            return False
        self.room = -(-n_tokens // BLOCK) * BLOCK
        for i, slot in enumerate(self.slots):
            self.slots[i] = (self._larger(slot[0]), self._larger(slot[1]))
        return True

    def _larger(self, old: Tensor) -> Tensor:
        # Zeros, because a weight of 0 times a NaN of fresh memory is a NaN.
        new = old.new_zeros((*old.shape[:2], self.room, old.shape[3]))
        new[:, :, : old.shape[2]] = old
        return new

    @contextlib.contextmanager
    def continued(self, n: int, n_seen: int | None) -> Iterator[Tensor]:
        """Let the attentions inside the block read the cache and add `n` tokens to it.

        Parameters
        ----------
        n : int
            Number of new tokens.
        n_seen : int, optional
            Number of tokens in the cache. None reads it from `length`: operations and addresses then are the same for
            texts of every length, as a recording needs.

        Yields
        ------
        int64 Tensor of shape (n,)
            Positions of the new tokens.
        """
        device = self.length.device
        first = self.length if n_seen is None else n_seen
        positions = torch.arange(n, device=device) + first
        mode = _Attending(self, n_seen, positions)
        with torch.no_grad(), mode:
            yield positions
        if mode.used != len(self.slots):
            raise SystemContractError(f"a rollout attends {mode.used} times, the first one {len(self.slots)}")
        if n_seen is None:
            self.length.add_(n)
        else:
            self.length.fill_(n_seen + n)


class _Attending(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Hands each call of torch's attention the keys and values of its slot, in one thread."""

    def __init__(self, cache: FixedCache, n_seen: int | None, positions: Tensor) -> None:
        super().__init__()
        self._cache, self._n_seen, self._positions, self.used = cache, n_seen, positions, 0
        self._end = cache.room if n_seen is None else n_seen + len(positions)
        at = torch.arange(self._end, device=positions.device)
        one = n_seen is not None and len(positions) == 1
        self._mask = None if one else at <= positions[:, None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any) -> Tensor:
        slots, begins = self._cache.slots, self._n_seen == 0
        if begins and self.used == len(slots):
            slots.append((self._cache._larger(key[:, :, :0]), self._cache._larger(value[:, :, :0])))
        if self.used >= len(slots):
            raise SystemContractError(f"a rollout attends more than {len(slots)} times, as the first one did")
        slot = slots[self.used]
        self.used += 1
        for kept, new in zip(slot, (key, value), strict=True):
            if self._n_seen is None:
                kept.index_copy_(2, self._positions, new)
            else:
                kept[:, :, self._n_seen : self._end] = new
        if begins:
            # A rollout's own call, with the same rounding.
            return scaled_dot_product_attention(query, key, value, *mask, **options)
        keys, values = (kept[:, :, : self._end] for kept in slot)
        same = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
        return scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, **same)


class Positioned(nn.Module):  # type: ignore[misc, unused-ignore]
    """A rotary embedding that gives the angles of other positions than those it is called with.

    Parameters
    ----------
    rotary : nn.Module
        ``rotary(x, position_ids)``.
    positions : int64 Tensor of shape (n,)
        The positions, for all prompts.
    """

    def __init__(self, rotary: nn.Module, positions: Tensor) -> None:
        super().__init__()
        self.rotary, self.positions = rotary, positions

    def forward(self, x: Tensor, position_ids: Tensor, *rest: Any, **more: Any) -> Any:
        """Angles of the given positions, in the shape that the model asks for."""
        return self.rotary(x, self.positions.expand_as(position_ids), *rest, **more)


class FixedCached(StepwiseSystem):
    """A system with a cache of fixed size. Each token attends to all earlier ones and to nothing else."""

    @property
    def n_positions(self) -> int | None:
        """Number of positions in the model's table of them. None if it computes them."""
        return None

    def caches(self) -> bool:
        """Whether this model's attention is plain, without windows or positions that depend on a text's length."""
        return True

    @abstractmethod
    def _logits_at(self, ids: Tensor, noise: Tensor | None, n_steps: int, positions: Tensor) -> Tensor:
        """Logits of a rollout of tokens at the given positions.

        Parameters
        ----------
        ids : int64 Tensor of shape (n_prompts, n)
            Token ids on the model's device.
        noise : Tensor of shape (n_prompts, n, width), optional
            Initial states, if they are drawn.
        n_steps : int
            Depth.
        positions : int64 Tensor of shape (n,)
            Positions of the tokens.
        """

    def new_cache(self) -> FixedCache:
        """An empty cache without room."""
        return FixedCache(self.device)

    @property
    def class_caches(self) -> bool:
        """Whether the model's class takes a cache of its own."""
        return cache_name(self.model.forward) is not None

    def _grown(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with the cache of the class, which grows with each token."""
        raise NotImplementedError

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any] | None:
        """Continue with the cache of the class if it has one, because that takes fewer calls a token.

        Otherwise, and with a `FixedCache` from `new_cache`, it has keys and values of each attention of a rollout. None
        if the attention is not plain.
        """
        if not isinstance(cache, FixedCache):
            if self.class_caches:
                return self._grown(batch, n_steps, n_seen, cache)
            cache = self.new_cache()
        if not self.caches():
            return None
        ids = self.to_device(batch.input_ids[:, n_seen:])
        self.reserve(cache, batch.input_ids.shape[1])
        noise = self.noise(batch, n_seen)
        with cache.continued(ids.shape[1], n_seen) as positions:
            logits = self._logits_at(ids, noise, n_steps, positions)
        if not cache.slots:
            raise ConfigError(f"{type(self.model).__name__} does not attend by torch's function: no cache")
        return logits, cache

    def reserve(self, cache: FixedCache, n_tokens: int) -> bool:
        """Make room for this number of tokens. Return whether the cache's tensors moved.

        Raises
        ------
        ConfigError
            If the model has fewer positions.
        """
        limit = self.n_positions
        if limit is not None and n_tokens > limit:
            raise ConfigError(f"{self.name}: {n_tokens} tokens, but the model has {limit} positions")
        return cache.reserve(n_tokens)

    def continued(self, ids: Tensor, noise: Tensor | None, n_steps: int, cache: FixedCache) -> Tensor:
        """Logits of tokens (n_prompts, n) at the positions that the cache's `length` gives, for a recording.

        `ids` and `noise` are on the model's device, and the cache has room for the tokens.
        """
        with cache.continued(ids.shape[1], None) as positions:
            return self._logits_at(ids, noise, n_steps, positions)
