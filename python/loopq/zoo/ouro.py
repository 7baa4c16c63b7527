"""A small model of Ouro's kind: embeddings as state, a stack of sandwich blocks, final norm between loops."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from loopq.zoo._layers import GatedMLP, RMSNorm, SplitAttention, init_linears, rope_tables
from loopq.zoo._model import ZooConfig, ZooModel


@dataclasses.dataclass
class OuroConfig(ZooConfig):
    """Settings of `ZooOuro`; see `ZooConfig` for the common ones. ``n_steps`` is Ouro's ``total_ut_steps``.

    Parameters
    ----------
    n_layers : int
        Layers of the looped stack.
    rope_base : float
        Base of the rotary angles.
    early_exit_threshold : float
        The first loop whose cumulative exit probability reaches it is read out; 1.0 reads the last one.
    """

    model_type: ClassVar[str] = "loopq-zoo-ouro"
    multiples: ClassVar = (("n_embd", 2, "n_heads"),)

    n_steps: int = 4
    n_layers: int = 2
    rope_base: float = 10_000.0
    early_exit_threshold: float = 1.0


class OuroLayer(nn.Module):
    """``x += norm_2(attn(norm(x)))``, then the same with the MLP: norms on the branches."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        d, heads = config.n_embd, config.n_heads
        self.input_layernorm = RMSNorm(d, config.norm_eps)
        self.self_attn = SplitAttention(d, heads, heads, d // heads)
        self.input_layernorm_2 = RMSNorm(d, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(d, config.norm_eps)
        self.mlp = GatedMLP(d, config.intermediate_size)
        self.post_attention_layernorm_2 = RMSNorm(d, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), rope))
        out: Tensor = x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))
        return out


class ZooOuro(ZooModel):
    """Ouro-like looped byte model.

    Notes
    -----
    ``s_0 = embed_tokens(ids)``; ``s_{t+1} = norm(layers(s_t))``; logits are ``lm_head(s_N)``. The exit gate
    is called once per loop, as in Ouro; with a threshold of 1.0 the last loop is read. It is not trained.
    """

    config_class = OuroConfig
    config: OuroConfig

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, d),
                "layers": nn.ModuleList(OuroLayer(config) for _ in range(config.n_layers)),
                "norm": RMSNorm(d, config.norm_eps),
                "early_exit_gate": nn.Linear(d, 1),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
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
        rope = rope_tables(x, self.config.n_embd // self.config.n_heads, self.config.rope_base)
        for layer in self.model["layers"]:
            x = layer(x, rope)
        out: Tensor = self.model["norm"](x)
        return out

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(latents)
        return logits.float()

    def exit_probabilities(self, states: list[Tensor]) -> Tensor:
        """Return the probability (loops, batch, seq) of leaving after each loop; the last takes the rest."""
        leave = torch.stack([self.model["early_exit_gate"](s).squeeze(-1) for s in states]).float().sigmoid()
        stay = torch.cumprod(1 - leave, 0)
        before = torch.cat((torch.ones_like(stay[:1]), stay[:-1]))
        return torch.cat((leave[:-1] * before[:-1], before[-1:]))

    def rollout(
        self,
        input_ids: Tensor,
        num_steps: int | None = None,
        init_state: Tensor | None = None,
        seed: int | None = None,
        first_row: int = 0,
    ) -> Tensor:
        loops = self.states(input_ids, num_steps, init_state, seed, first_row)[1:]
        reached = self.exit_probabilities(loops).cumsum(0) >= self.config.early_exit_threshold
        # Rounding must not decide: the sum over all loops counts as one, the sums before it do not.
        reached[-1] = True
        if self.config.early_exit_threshold >= 1.0:
            reached[:-1] = False
        chosen = reached.int().argmax(0)
        picked = torch.stack(loops).gather(0, chosen[None, ..., None].expand(1, *loops[0].shape))[0]
        return self.predict_from_latents(picked)
