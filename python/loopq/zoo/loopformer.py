"""A small model of LoopFormer's kind: gated residual blocks modulated by the time and size of each step."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import ConfigError
from loopq.zoo._layers import RMSNorm, causal_attention, init_linears, merge_heads, split_heads
from loopq.zoo._model import ZooConfig, ZooModel

N_FREQUENCIES = 128
MAX_PERIOD = 10_000.0


@dataclasses.dataclass
class LoopFormerConfig(ZooConfig):
    """Settings of `ZooLoopFormer`; see `ZooConfig` for the common ones.

    Parameters
    ----------
    n_layers : int
        Blocks of the loop.
    """

    model_type: ClassVar[str] = "loopq-zoo-loopformer"

    n_layers: int = 2


class LoopFormerAttention(nn.Module):
    """Causal attention with fused ``c_attn``; positions come with the embeddings."""

    def __init__(self, config: LoopFormerConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.n_heads) for part in self.c_attn(x).chunk(3, -1))
        out: Tensor = self.c_proj(merge_heads(causal_attention(q, k, v)))
        return out


class LoopFormerMLP(nn.Module):
    """``c_proj(gelu(c_fc(x)))``."""

    def __init__(self, config: LoopFormerConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.c_proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return out


class LoopFormerBlock(nn.Module):
    """``x += g1 * attn(rms(x) (1 + a1)); x += g2 * mlp(rms(x) (1 + a2))``, gates and scales from (t, dt).

    ``adaLN_modulation`` gives ``g1, g2, a1, a2`` in this order; the norms have no weight.
    """

    def __init__(self, config: LoopFormerConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.norm_1 = RMSNorm(d, config.norm_eps, affine=False)
        self.attn = LoopFormerAttention(config)
        self.norm_2 = RMSNorm(d, config.norm_eps, affine=False)
        self.mlp = LoopFormerMLP(config)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 4 * d))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        g1, g2, a1, a2 = self.adaLN_modulation(c)[:, None].chunk(4, -1)
        x = x + g1 * self.attn(self.norm_1(x) * (1 + a1))
        out: Tensor = x + g2 * self.mlp(self.norm_2(x) * (1 + a2))
        return out


class LoopFormerStack(nn.Module):
    """All blocks of the loop, once: ``h(x, c)``."""

    def __init__(self, config: LoopFormerConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LoopFormerBlock(config) for _ in range(config.n_layers))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x


class TimestepEmbedder(nn.Module):
    """Sinusoids of a number per row, then a two-layer MLP: (batch,) to (batch, d)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * N_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        power = torch.arange(N_FREQUENCIES, dtype=torch.float32, device=t.device) / N_FREQUENCIES
        angle = t.float()[:, None] * torch.exp(-math.log(MAX_PERIOD) * power)
        # Angles need float32 whatever the model's type: a step of 1/N is below bfloat16's resolution.
        waves = torch.cat((angle.cos(), angle.sin()), -1)
        out: Tensor = self.mlp(waves.to(self.mlp[0].weight.dtype))
        return out


class ZooLoopFormer(ZooModel):
    """LoopFormer-like looped byte model.

    Notes
    -----
    ``s_0 = wte(ids) + wpe(pos)``; step ``t`` of ``N`` runs the blocks with ``c = time(t / N) + dt(1 / N)``,
    so fewer steps are coarser ones; logits are ``lm_head(norm_f(s_N))`` with a tied head. The inputs of the
    modulation have one row per sequence and do not depend on the data.
    """

    config_class = LoopFormerConfig
    prefix_rollouts = False
    config: LoopFormerConfig

    def __init__(self, config: LoopFormerConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "wpe": nn.Embedding(config.block_size, d),
                "h": LoopFormerStack(config),
                "norm_f": RMSNorm(d, config.norm_eps),
            }
        )
        self.time_embedder = TimestepEmbedder(d)
        self.dt_embedder = TimestepEmbedder(d)
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        init_linears(self, config.n_layers * config.n_steps)
        self.lm_head.weight = self.transformer["wte"].weight
        for block in self.transformer["h"].blocks:
            # Gates start open: with all of them near zero the blocks hardly learn in a short training.
            nn.init.constant_(block.adaLN_modulation[1].bias[: 2 * d], 0.5)

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        if input_ids.shape[1] > self.config.block_size:
            raise ConfigError(
                f"loopformer: {input_ids.shape[1]} positions, but the learned ones end at "
                f"block_size {self.config.block_size}: cut the sequences"
            )
        embeds: Tensor = (
            self.transformer["wte"](input_ids) + self.transformer["wpe"].weight[: input_ids.shape[1]]
        )
        return embeds

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Return the embeddings themselves; there is no noise, so ``seed`` changes nothing."""
        return input_embeds

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        depth = self.config.n_steps if num_steps is None else num_steps
        ones = torch.ones(input_states.shape[0], device=input_states.device)
        c = self.time_embedder(ones * (step / depth)) + self.dt_embedder(ones / depth)
        out: Tensor = self.transformer["h"](input_states, c)
        return out

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer["norm_f"](latents))
        return logits.float()
