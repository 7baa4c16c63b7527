"""A small IQuest-Coder-Loop: a Llama stack; later loops mix the first loop's keys with their own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor, nn

from benches.zoo.models.layers import GatedMLP
from loopq.zoo.config import SmallConfig
from loopq.zoo.layers import RMSNorm, init_linears, rotary_angles, split_heads


@dataclasses.dataclass
class IQuestConfig(SmallConfig):
    """Settings of `SmallIQuest`; see `SmallConfig` for the common ones.

    Parameters
    ----------
    loop_num : int
        Loops.
    loop_window_size : int
        Positions that a later loop reads of its own keys.
    n_layers : int
        Layers of the looped stack.
    n_kv_heads : int
        Key/value heads (grouped-query attention).
    head_dim : int
        Width of a head.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-iquest"
    multiples: ClassVar = (("n_heads", 1, "n_kv_heads"), ("head_dim", 2, None))

    loop_num: int = 2
    loop_window_size: int = 64
    n_layers: int = 2
    n_kv_heads: int = 2
    head_dim: int = 16
    rope_base: float = 500_000.0


class Past:
    """Keys and values (batch, heads, seq, width): all of loop 0, a window of the others, by (loop, layer)."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, loop: int, layer: int, *new: Tensor) -> tuple[Tensor, Tensor]:
        before = self.kept.get((loop, layer))
        if before is not None:
            new = tuple(torch.cat(pair, 2) for pair in zip(before, new, strict=True))
        key, value = new if loop == 0 else (x[:, :, -self.window :] for x in new)
        self.kept[loop, layer] = key, value
        return key, value


class Gate(nn.Module):
    """``sigmoid(w_h . q_h + b_h)`` for each head h: (batch, heads, seq, width) to (batch, heads, seq, 1)."""

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(n_heads))

    def forward(self, query: Tensor) -> Tensor:
        return torch.sigmoid((query * self.weight[:, None]).sum(-1, keepdim=True) + self.bias[:, None, None])


class Attention(nn.Module):
    """Attention of one token to the past, in a later loop mixed by the gate; one call for each token."""

    def __init__(self, config: IQuestConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.n_embd, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.n_embd, config.n_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.n_embd, config.n_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.n_embd, bias=False)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], loop: int, layer: int, gate: Gate, past: Past
    ) -> Tensor:
        q = _rotate(split_heads(self.q_proj(x), self.n_heads), *rope)
        k = _rotate(split_heads(self.k_proj(x), self.n_kv_heads), *rope)
        keys_values = past.add(loop, layer, k, split_heads(self.v_proj(x), self.n_kv_heads))
        heads = self.read(q, *keys_values)
        if loop:
            share = gate(q)
            heads = share * self.read(q, *past.kept[0, layer]) + (1 - share) * heads
        # As published: right for one token, heads in another order for several.
        out: Tensor = self.o_proj(heads.reshape(*x.shape[:2], -1))
        return out

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for x in (k, v))
        return torch.softmax(q @ k.mT / self.head_dim**0.5, -1) @ v


class Layer(nn.Module):
    """``x += attn(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, config: IQuestConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = GatedMLP(config.n_embd, config.intermediate_size)


class RotaryTables(nn.Module):
    """``rotary_emb(x, position_ids)``: cosines and sines (batch, seq, width) in the type of `x`."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = rotary_angles(position_ids[0], self.dim, self.base).repeat(1, 2)[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class IQuestModel(nn.Module):
    """Inner model: embeddings, layers, norm, rotary tables, and a gate for each layer."""

    def __init__(self, config: IQuestConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.rotary_emb = RotaryTables(config.head_dim, config.rope_base)
        self.gate_projections = nn.ModuleList(
            Gate(config.n_heads, config.head_dim) for _ in range(config.n_layers)
        )
        self.loop_num, self.loop_window_size = config.loop_num, config.loop_window_size


class SmallIQuest(nn.Module):
    """IQuest-Coder-Loop's class: ``s_{t+1} = layers_t(s_t)`` from the embeddings, logits ``lm_head(norm(s_N))``."""

    def __init__(self, config: IQuestConfig) -> None:
        super().__init__()
        self.config = config
        self.model = IQuestModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        init_linears(self, config.n_layers * config.loop_num)

    def forward(self, input_ids: Tensor, past_key_values: Past | None = None) -> SimpleNamespace:
        """Return float32 `logits` (batch, 1, vocab) of the next token of every prompt, and `past_key_values`."""
        inner = self.model
        past = Past(inner.loop_window_size) if past_key_values is None else past_key_values
        seen = past.kept[0, 0][0].shape[2] if past.kept else 0
        x = inner.embed_tokens(input_ids)
        rope = inner.rotary_emb(x, torch.arange(seen, seen + input_ids.shape[1])[None])
        for loop in range(inner.loop_num):
            for i, layer in enumerate(inner.layers):
                normed = layer.input_layernorm(x)
                x = x + layer.self_attn(normed, rope, loop, i, inner.gate_projections[i], past)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return SimpleNamespace(logits=self.lm_head(inner.norm(x)).float(), past_key_values=past)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
