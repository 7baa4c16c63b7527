"""IQuest-Coder-Loop: a Llama stack run twice. From the second loop on, heads also read the first loop's keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, LoopedSystem, Published
from loopq.systems.declare import declare
from loopq.systems.llama_loops import llama_linears

Cache = dict[tuple[int, int], tuple["Tensor", "Tensor"]]


@SYSTEMS.register("iquest")
class IQuest(LoopedSystem):
    """IQuest-Coder-V1-40B-Loop (remote code).

    Loop 0 is a plain Llama. In a later loop each head of a layer reads twice with one query. G reads loop 0's keys and
    values at all positions up to the query's. L reads the current loop's at the last `loop_window_size` of them. The
    output is ``g G + (1 - g) L`` with ``g = sigmoid(w . q + b)``. w and b belong to the layer's `gate_projections`.

    The published forward works on one token at a time, as in a server. With several tokens it permutes the heads, and
    without a cache it fails. The adapter therefore runs the layers itself, on all tokens at once, with the results of
    one after the other. There is no single step, because a loop passes on more than a hidden state: the next loop also
    needs loop 0's keys and values.
    """

    name = "iquest"
    summary = "s = layers(s); from the second loop on, gated attention to loop 0 and to a window"
    published = Published({"IQuest-Coder-V1-40B-Loop": 560}, code="checkpoint")

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `model.gate_projections` beside `model.layers`."""
        names = dict(model.named_modules())
        return "model.gate_projections.0" in names and "model.layers.0.self_attn.q_proj" in names

    @property
    def n_steps(self) -> int:
        """`config.loop_num`."""
        return int(self.model.config.loop_num)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Seven linears of every layer: 560 of 80 layers."""
        return declare(self.model, llama_linears(self.model), n_steps)

    def left_out(self) -> dict[str, str]:
        """The gates."""
        reason = "a gate: a vector for each head, which multiplies its query"
        gates = self.model.model.gate_projections
        return {f"model.gate_projections.{i}.weight": reason for i in range(len(gates))}

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run all layers `n_steps` times over all tokens."""
        depth = self.check_depth(n_steps)
        with torch.set_grad_enabled(self.keeps_graph):
            return self._run(self.to_device(batch.input_ids), depth, 0, {})

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with keys and values of all tokens, for each layer of each loop."""
        cache = {} if cache is None else cache
        return self._run(self.to_device(batch.input_ids[:, n_seen:]), n_steps, n_seen, cache), cache

    def _run(self, ids: Tensor, n_steps: int, n_seen: int, cache: Cache) -> Tensor:
        """Logits of the tokens `ids`, which follow the `n_seen` tokens in the cache. The cache grows by them."""
        inner = self.model.model
        state = inner.embed_tokens(ids)
        positions = torch.arange(n_seen, n_seen + ids.shape[1], device=ids.device)
        rope = inner.rotary_emb(state, positions[None])
        for t in range(n_steps):
            for i, layer in enumerate(inner.layers):
                heads = self._heads(layer.self_attn, layer.input_layernorm(state), rope, (t, i), cache)
                state = state + layer.self_attn.o_proj(heads.transpose(1, 2).flatten(2))
                state = state + layer.mlp(layer.post_attention_layernorm(state))
        logits: Tensor = self.model.lm_head(inner.norm(state)).float()
        return logits

    def _heads(self, attention: Any, x: Tensor, rope: Any, place: tuple[int, int], cache: Cache) -> Tensor:
        """Output of a layer's heads in a loop, of shape (n_prompts, n_heads, n_tokens, head width)."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = _rotated(q, *rope), _rotated(k, *rope)
        if place in cache:
            before = cache[place]
            k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        cache[place] = k, v
        loop, layer = place
        if loop == 0:
            return _attend(q, k, v)
        inner = self.model.model
        gate: Tensor = inner.gate_projections[layer](q)
        return gate * _attend(q, *cache[0, layer]) + (1 - gate) * _attend(q, k, v, inner.loop_window_size)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (n_prompts, n_heads, n_tokens, width) by rotary tables (1, n_tokens, width)."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of the last tokens to all, or to the last `window` up to each. Heads of k and v repeat."""
    at = torch.arange(k.shape[2], device=k.device)
    back = at[-q.shape[2] :, None] - at
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
