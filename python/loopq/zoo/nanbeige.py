"""A small model of Nanbeige4.2's kind: a Llama stack run twice, final norm after every loop, untied head."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from loopq.zoo._layers import GatedMLP, RMSNorm, SplitAttention, init_linears, rope_tables
from loopq.zoo._model import ZooConfig, ZooModel


@dataclasses.dataclass
class NanbeigeConfig(ZooConfig):
    """Settings of `ZooNanbeige`; see `ZooConfig` for the common ones. ``n_steps`` is ``num_loops``.

    Parameters
    ----------
    n_layers : int
        Layers of the looped stack.
    n_kv_heads : int
        Key/value heads (grouped-query attention).
    head_dim : int
        Width of a head; not ``n_embd / n_heads``.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-nanbeige"
    multiples: ClassVar = (("n_heads", 1, "n_kv_heads"), ("head_dim", 2, None))

    n_heads: int = 4
    n_steps: int = 2
    n_layers: int = 3
    n_kv_heads: int = 2
    head_dim: int = 48
    rope_base: float = 10_000.0


class NanbeigeLayer(nn.Module):
    """``x += attn(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.input_layernorm = RMSNorm(d, config.norm_eps)
        self.self_attn = SplitAttention(d, config.n_heads, config.n_kv_heads, config.head_dim)
        self.post_attention_layernorm = RMSNorm(d, config.norm_eps)
        self.mlp = GatedMLP(d, config.intermediate_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class ZooNanbeige(ZooModel):
    """Nanbeige-like looped byte model.

    Notes
    -----
    ``s_0 = embed_tokens(ids)``; ``s_{t+1} = norm(layers(s_t))``; logits are ``lm_head(s_N)``, untied.
    """

    config_class = NanbeigeConfig
    config: NanbeigeConfig

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.n_embd),
                "layers": nn.ModuleList(NanbeigeLayer(config) for _ in range(config.n_layers)),
                "norm": RMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        init_linears(self, config.n_layers * config.n_steps)

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        embeds: Tensor = self.model["embed_tokens"](input_ids)
        return embeds

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Return the embeddings themselves; there is no noise, so ``seed`` changes nothing."""
        return input_embeds

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        x = input_states
        rope = rope_tables(x, self.config.head_dim, self.config.rope_base)
        for layer in self.model["layers"]:
            x = layer(x, rope)
        out: Tensor = self.model["norm"](x)
        return out

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(latents)
        return logits.float()
