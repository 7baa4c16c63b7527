"""A small model of R-Llama's kind: tiny noise state, concat adapter, pre-norm residual core, untied head."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from loopq.zoo._layers import (
    RMSNorm,
    causal_attention,
    init_linears,
    merge_heads,
    rope_tables,
    rotate_half,
    row_noise,
    split_heads,
)
from loopq.zoo._model import ZooConfig, ZooModel
from loopq.zoo.huginn import HuginnMLP


@dataclasses.dataclass
class RLlamaConfig(ZooConfig):
    """Settings of `ZooRLlama`; see `ZooConfig` for the common ones.

    Parameters
    ----------
    n_kv_heads : int
        Key/value heads (grouped-query attention).
    n_prelude, n_core, n_coda : int
        Blocks before, in and after the loop.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-rllama"
    multiples: ClassVar = (("n_embd", 2, "n_heads"), ("n_heads", 1, "n_kv_heads"))

    n_heads: int = 4
    n_kv_heads: int = 2
    n_prelude: int = 0
    n_core: int = 2
    n_coda: int = 0
    rope_base: float = 10_000.0


class RLlamaAttention(nn.Module):
    """Grouped-query attention with fused ``Wqkv`` (all q, then k, then v) and half-rotation RoPE."""

    def __init__(self, config: RLlamaConfig) -> None:
        super().__init__()
        head = config.n_embd // config.n_heads
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.widths = [config.n_heads * head, config.n_kv_heads * head, config.n_kv_heads * head]
        self.Wqkv = nn.Linear(config.n_embd, sum(self.widths), bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm_1(x), rope)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class ZooRLlama(ZooModel):
    """R-Llama-like looped byte model.

    Notes
    -----
    As `ZooHuginn`, with these differences: blocks without norms on the stream, embedding scale 1, noise of
    variance ``2 / (5 d)``, the raw state goes to the coda, one ``ln_f``, an untied head.
    """

    config_class = RLlamaConfig
    config: RLlamaConfig

    def __init__(self, config: RLlamaConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "prelude": nn.ModuleList(RLlamaBlock(config) for _ in range(config.n_prelude)),
                "adapter": nn.Linear(2 * d, d, bias=False),
                "core_block": nn.ModuleList(RLlamaBlock(config) for _ in range(config.n_core)),
                "coda": nn.ModuleList(RLlamaBlock(config) for _ in range(config.n_coda)),
                "ln_f": RMSNorm(d, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        init_linears(self, config.n_prelude + config.n_core * config.n_steps + config.n_coda)

    def rope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary tables for the positions of ``x`` (batch, seq, d)."""
        return rope_tables(x, self.config.n_embd // self.config.n_heads, self.config.rope_base)

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.transformer["wte"](input_ids)
        for block in self.transformer["prelude"]:
            x = block(x, self.rope(x))
        return x

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Draw the noise state; with a seed, row ``i`` depends on ``seed`` and ``first_row + i`` only."""
        std = math.sqrt(2.0 / (5.0 * self.config.n_embd))
        if seed is None:
            noise = torch.empty_like(input_embeds)
            return nn.init.trunc_normal_(noise, std=std, a=-3 * std, b=3 * std)
        rows, *shape = input_embeds.shape
        return row_noise(rows, tuple(shape), std, seed, first_row).to(input_embeds)

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        x = self.transformer["adapter"](torch.cat((input_states, input_embeds), -1))
        rope = self.rope(x)
        for block in self.transformer["core_block"]:
            x = block(x, rope)
        return x

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        x = latents
        for block in self.transformer["coda"]:
            x = block(x, self.rope(x))
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits.float()
