"""PonderPythia's class in small: the whole model is the loop, fed back through its softmax."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benches.zoo.models.layers import Rope, Rotary, rotate_half
from loopq.zoo.config import SmallConfig
from loopq.zoo.layers import causal_attention, init_linears, merge_heads


@dataclasses.dataclass
class PonderConfig(SmallConfig):
    """Settings of `SmallPonder`; see `SmallConfig` for the common ones.

    Parameters
    ----------
    pondering_steps : int
        Updates of the embedding; a rollout has one pass more.
    n_layers : int
        Layers of the GPT-NeoX stack.
    rotary_pct : float
        Share of a head's dimensions that is rotated.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-ponder"
    multiples: ClassVar = (("n_embd", 1, "n_heads"), ("rotary_dim", 2, None))
    least: ClassVar = {"rotary_dim": 2}

    pondering_steps: int = 3
    n_layers: int = 2
    rotary_pct: float = 0.25
    rope_base: float = 10_000.0

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head."""
        return int(self.n_embd // self.n_heads * self.rotary_pct)


class NeoXAttention(nn.Module):
    """Causal attention, ``query_key_value`` fused and interleaved per head, biases, partial RoPE."""

    def __init__(self, config: PonderConfig) -> None:
        super().__init__()
        self.n_heads, self.rotary = config.n_heads, config.rotary_dim
        self.query_key_value = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.dense = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        per_head = self.query_key_value(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        q, k, v = per_head.chunk(3, -1)
        q, k = (
            torch.cat((rotate_half(p[..., : self.rotary], *rope), p[..., self.rotary :]), -1) for p in (q, k)
        )
        out: Tensor = self.dense(merge_heads(causal_attention(q, k, v)))
        return out


class NeoXMLP(nn.Module):
    """``dense_4h_to_h(gelu(dense_h_to_4h(x)))`` with biases."""

    def __init__(self, config: PonderConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.n_embd, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))
        return out


class NeoXLayer(nn.Module):
    """Parallel residual: ``x + attention(ln_1(x)) + mlp(ln_2(x))``."""

    def __init__(self, config: PonderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.n_embd, eps=config.norm_eps)
        self.attention = NeoXAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = NeoXMLP(config)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        attended = self.attention(self.input_layernorm(x), rope)
        out: Tensor = x + attended + self.mlp(self.post_attention_layernorm(x))
        return out


class NeoXModel(nn.Module):
    """The stack: ``gpt_neox(inputs_embeds=E)`` gives a tuple that begins with the final hidden states."""

    def __init__(self, config: PonderConfig) -> None:
        super().__init__()
        self.embed_in = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(NeoXLayer(config) for _ in range(config.n_layers))
        self.final_layer_norm = nn.LayerNorm(config.n_embd, eps=config.norm_eps)
        self.rotary_emb = Rotary(config.rotary_dim, config.rope_base)

    def forward(self, inputs_embeds: Tensor, use_cache: bool | None = None) -> tuple[Tensor, ...]:
        positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        x, rope = inputs_embeds, self.rotary_emb(inputs_embeds, positions)
        for layer in self.layers:
            x = layer(x, rope)
        out = self.final_layer_norm(x)
        # As in transformers, a cache is kept unless it is declined; here it is empty.
        return (out,) if use_cache is False else (out, ())


class SmallPonder(nn.Module):
    """PonderPythia's class: the whole language model is the loop, fed back through its softmax.

    Notes
    -----
    ``E_0 = W[ids]``; ``E_{t+1} = E_t + softmax(embed_out(gpt_neox(E_t))) W`` for `pondering_steps` updates; one more
    pass gives the logits ``embed_out(gpt_neox(E))``. So every layer and ``embed_out`` is called
    ``pondering_steps + 1`` times, and the state is the accumulated embedding.
    """

    def __init__(self, config: PonderConfig) -> None:
        super().__init__()
        self.config = config
        self.gpt_neox = NeoXModel(config)
        self.embed_out = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        init_linears(self, config.n_layers * (config.pondering_steps + 1))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Return float32 `logits` (batch, seq, vocab) of int64 ids (batch, seq)."""
        table = self.gpt_neox.embed_in.weight
        embeds = self.gpt_neox.embed_in(input_ids)
        for _ in range(self.config.pondering_steps):
            mixture = self.embed_out(self.gpt_neox(embeds, use_cache=False)[0]).softmax(-1)
            # The embedding matrix serves as a matmul operand here: no module is called.
            embeds = embeds + mixture @ table
        logits = self.embed_out(self.gpt_neox(embeds, use_cache=False)[0]).float()
        return SimpleNamespace(logits=logits, past_key_values=None)
