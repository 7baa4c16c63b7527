"""R-Llama's class in small: tiny noise state, concat adapter, pre-norm residual core, untied head."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benches.zoo.models.layers import Rope, Rotary, rotate_half
from loopq.zoo.huginn import HuginnConfig, HuginnMLP, SmallHuginn
from loopq.zoo.layers import RMSNorm, causal_attention, merge_heads, split_heads


@dataclasses.dataclass
class RLlamaConfig(HuginnConfig):
    """Settings of `SmallRLlama`: those of Huginn's class, and `n_kv_heads`, the key/value heads."""

    model_type: ClassVar[str] = "loopq-zoo-rllama"
    multiples: ClassVar[tuple[tuple[str, int, str | None], ...]] = (
        ("n_embd", 2, "n_heads"),
        ("n_heads", 1, "n_kv_heads"),
    )

    n_kv_heads: int = 2
    tie_embeddings: bool = False


class RLlamaAttention(nn.Module):
    """Grouped-query attention with fused ``Wqkv`` (all q, then k, then v) and half-rotation RoPE."""

    def __init__(self, config: RLlamaConfig) -> None:
        super().__init__()
        head = config.n_embd // config.n_heads
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.widths = [config.n_heads * head, config.n_kv_heads * head, config.n_kv_heads * head]
        self.Wqkv = nn.Linear(config.n_embd, sum(self.widths), bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        q, k, v = self.Wqkv(x).split(self.widths, -1)
        q = rotate_half(split_heads(q, self.n_heads), *rope)
        k = rotate_half(split_heads(k, self.n_kv_heads), *rope)
        out: Tensor = self.proj(merge_heads(causal_attention(q, k, split_heads(v, self.n_kv_heads))))
        return out


class RLlamaBlock(nn.Module):
    """``x += attn(norm_1(x)); x += mlp(norm_2(x))``: a pure identity path."""

    def __init__(self, config: RLlamaConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = RLlamaAttention(config)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = HuginnMLP(config)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        x = x + self.attn(self.norm_1(x), rope)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class SmallRLlama(SmallHuginn):
    """R-Llama's class: Huginn's with blocks without norms on the stream, scale 1, one ``ln_f``, an untied head.

    Its rotary tables come from ``rotary_emb``, and the raw state goes to the coda.
    """

    block_class = RLlamaBlock

    def __init__(self, config: RLlamaConfig) -> None:
        super().__init__(config)
        self.emb_scale = 1.0

    def add_rotary(self, head_dim: int) -> None:
        self.rotary_emb = Rotary(head_dim, self.config.rope_base)

    def rotary(self, embeds: Tensor) -> Any:
        return self.rotary_emb(embeds, torch.arange(embeds.shape[1], device=embeds.device)[None])

    def tables(self, freqs: Any) -> Rope:
        return freqs

    def leave_loop(self, x: Tensor) -> Tensor:
        return x
