"""LoopFormer's class in small: gated residual blocks modulated by the time and size of each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import ConfigError
from loopq.zoo.config import SmallConfig
from loopq.zoo.layers import RMSNorm, causal_attention, init_linears, merge_heads, split_heads

N_FREQUENCIES = 128
MAX_PERIOD = 10_000.0
DEFAULT_STEPS = (1 / 8,) * 8


@dataclasses.dataclass
class LoopFormerConfig(SmallConfig):
    """Settings of `SmallLoopFormer`; see `SmallConfig` for the common ones.

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
        self.norm = ((d,), None, config.norm_eps)
        self.attn = LoopFormerAttention(config)
        self.mlp = LoopFormerMLP(config)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 4 * d))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        g1, g2, a1, a2 = self.adaLN_modulation(c)[:, None].chunk(4, -1)
        x = x + g1 * self.attn(F.rms_norm(x, *self.norm) * (1 + a1))
        out: Tensor = x + g2 * self.mlp(F.rms_norm(x, *self.norm) * (1 + a2))
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
        # Angles need float32 in a model of any type: a step of 1/N is below bfloat16's resolution.
        waves = torch.cat((angle.cos(), angle.sin()), -1)
        out: Tensor = self.mlp(waves.to(self.mlp[0].weight.dtype))
        return out


class SmallLoopFormer(nn.Module):
    """LoopFormer's class: gated residual blocks modulated by the time and size of each step; plain torch.

    Notes
    -----
    ``s_0 = wte(ids) + wpe(pos)``. A step of size ``dt`` at time ``t`` runs the blocks with ``c = time(t) + dt(dt)``,
    so fewer steps are coarser ones. Logits are ``lm_head(norm_f(s_N))`` with a tied head. The inputs of the
    modulation have one row per sequence and do not depend on the data.
    """

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
        init_linears(self, config.n_layers * len(DEFAULT_STEPS))
        self.lm_head.weight = self.transformer["wte"].weight
        for block in self.transformer["h"].blocks:
            # Gates start open: with all of them near zero the blocks hardly learn in a short training.
            nn.init.constant_(block.adaLN_modulation[1].bias[: 2 * d], 0.5)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, steps: Sequence[float] = DEFAULT_STEPS
    ) -> tuple[Tensor, Tensor | None]:
        """Run one rollout.

        Parameters
        ----------
        idx : int64 array (batch, seq)
            Byte values.
        targets : int64 array (batch, seq), optional
            What each position is to predict; without it the logits are those of the last position only.
        steps : sequence of float
            Sizes of the steps.

        Returns
        -------
        logits : float32 array (batch, seq or 1, vocab)
        loss : float32 scalar or None
            Mean cross-entropy to the targets, in nats.

        Raises
        ------
        ConfigError
            If the sequence has more positions than were trained.
        """
        if idx.shape[1] > self.config.block_size:
            raise ConfigError(
                f"loopformer: {idx.shape[1]} positions, but the learned ones end at "
                f"block_size {self.config.block_size}: cut the sequences"
            )
        parts = self.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1], device=idx.device))
        now = torch.zeros(idx.shape[0], dtype=x.dtype, device=idx.device)
        for dt in steps:
            x = parts["h"](x, self.time_embedder(now) + self.dt_embedder(torch.ones_like(now) * dt))
            now = now + dt
        x = parts["norm_f"](x)
        logits = self.lm_head(x if targets is not None else x[:, -1:]).float()
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
