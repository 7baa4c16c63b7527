"""A small model of PonderPythia's kind: the whole model is the loop, fed back through its softmax."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.zoo._layers import causal_attention, init_linears, merge_heads, rope_tables, rotate_half
from loopq.zoo._model import ZooConfig, ZooModel


@dataclasses.dataclass
class PonderConfig(ZooConfig):
    """Settings of `ZooPonder`; see `ZooConfig` for the common ones.

    ``n_steps`` counts passes of the language model: ``pondering_steps + 1``.

    Parameters
    ----------
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

    n_steps: int = 4
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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        attended = self.attention(self.input_layernorm(x), rope)
        out: Tensor = x + attended + self.mlp(self.post_attention_layernorm(x))
        return out


class ZooPonder(ZooModel):
    """PonderPythia-like looped byte model.

    Notes
    -----
    ``E_0 = W[ids]``; ``E_{t+1} = E_t + softmax(embed_out(gpt_neox(E_t))) W``; after ``N - 1`` such updates
    the ``N``-th pass gives ``embed_out(gpt_neox(E_{N-1}))``. So every layer and ``embed_out`` is called
    ``N`` times, and the state is the accumulated embedding.
    """

    config_class = PonderConfig
    config: PonderConfig

    def __init__(self, config: PonderConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.gpt_neox = nn.ModuleDict(
            {
                "embed_in": nn.Embedding(config.vocab_size, d),
                "layers": nn.ModuleList(NeoXLayer(config) for _ in range(config.n_layers)),
                "final_layer_norm": nn.LayerNorm(d, eps=config.norm_eps),
            }
        )
        self.embed_out = nn.Linear(d, config.vocab_size, bias=False)
        init_linears(self, config.n_layers * config.n_steps)

    def n_updates(self, depth: int) -> int:
        """Return ``depth - 1``: the last pass is the readout."""
        return depth - 1

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        embeds: Tensor = self.gpt_neox["embed_in"](input_ids)
        return embeds

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Return the embeddings themselves; there is no noise, so ``seed`` changes nothing."""
        return input_embeds

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        mixture = self.predict_from_latents(input_states).softmax(-1)
        # The embedding matrix serves as a matmul operand here: no module is called.
        table = self.gpt_neox["embed_in"].weight
        return input_states + mixture.to(table.dtype) @ table

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        x = latents
        rope = rope_tables(x, self.config.rotary_dim, self.config.rope_base)
        for layer in self.gpt_neox["layers"]:
            x = layer(x, rope)
        logits: Tensor = self.embed_out(self.gpt_neox["final_layer_norm"](x))
        return logits.float()
