"""Mamba's class in small: selective scan, no shared block, the recurrence runs over tokens."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.zoo.config import SmallConfig
from loopq.zoo.layers import RMSNorm


@dataclasses.dataclass
class MambaConfig(SmallConfig):
    """Settings of `SmallMamba`; see `SmallConfig` for the common ones. ``n_heads`` is idle.

    Parameters
    ----------
    n_layers : int
        Mixer layers; ``intermediate_size`` is their inner width.
    state_size : int
        State entries per inner channel.
    dt_rank : int
        Rank of the step-size projection.
    conv_kernel : int
        Width of the causal convolution.
    """

    model_type: ClassVar[str] = "loopq-zoo-mamba"
    multiples: ClassVar = ()

    intermediate_size: int = 256
    n_layers: int = 3
    state_size: int = 8
    dt_rank: int = 8
    conv_kernel: int = 4


def selective_scan(decay: Tensor, drive: Tensor) -> list[Tensor]:
    """Return the states ``h_t = decay_t h_{t-1} + drive_t`` with ``h_{-1} = 0``.

    Parameters
    ----------
    decay, drive : float array (batch, seq, channels, state)
        ``exp(dt_t A)`` and ``dt_t B_t x_t``.

    Returns
    -------
    list of float array (batch, channels, state), one per token
    """
    state = torch.zeros_like(drive[:, 0])
    states = []
    for a, b in zip(decay.unbind(1), drive.unbind(1), strict=True):
        state = a * state + b
        states.append(state)
    return states


class MambaMixer(nn.Module):
    """Selective state-space mixer; ``dt_proj`` and ``conv1d`` are used through their weights, not called."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        d, inner, n = config.n_embd, config.intermediate_size, config.state_size
        self.widths = [config.dt_rank, n, n]
        self.in_proj = nn.Linear(d, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, config.conv_kernel, groups=inner)
        self.x_proj = nn.Linear(inner, sum(self.widths), bias=False)
        self.dt_proj = nn.Linear(config.dt_rank, inner)
        self.out_proj = nn.Linear(inner, d, bias=False)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, n + 1)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        nn.init.normal_(self.in_proj.weight, std=d**-0.5)
        nn.init.normal_(self.out_proj.weight, std=(inner * config.n_layers) ** -0.5)
        # Step sizes spread from 0.001 to 0.1, through the inverse of softplus.
        dt = torch.exp(torch.rand(inner) * math.log(100.0)) * 1e-3
        with torch.no_grad():
            self.dt_proj.bias.copy_(torch.log(torch.expm1(dt)))

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        width = self.conv1d.weight.shape[-1]
        padded = F.pad(x.transpose(1, 2), (width - 1, 0))
        x = F.silu(F.conv1d(padded, self.conv1d.weight, self.conv1d.bias, groups=x.shape[-1])).transpose(1, 2)
        rank, b, c = self.x_proj(x).split(self.widths, -1)
        # The scan multiplies hundreds of decays, so it runs in float32 in a model of any type.
        dt = F.softplus(rank.float() @ self.dt_proj.weight.float().T + self.dt_proj.bias.float())
        decay = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A_log.float()))
        states = selective_scan(decay, (dt * x.float()).unsqueeze(-1) * b.float().unsqueeze(2))
        read = zip(states, c.float().unbind(1), strict=True)
        y = torch.stack([(h * ct.unsqueeze(1)).sum(-1) for h, ct in read], 1)
        out: Tensor = self.out_proj(((y + self.D * x) * F.silu(z)).to(z.dtype))
        return out


class MambaLayer(nn.Module):
    """``x + mixer(norm(x))``."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mixer = MambaMixer(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mixer(self.norm(x))
        return out


class MambaModel(nn.Module):
    """The stack without the head."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(MambaLayer(config) for _ in range(config.n_layers))
        self.norm_f = RMSNorm(config.n_embd, config.norm_eps)
        nn.init.normal_(self.embeddings.weight, std=config.n_embd**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm_f(x)
        return out


class SmallMamba(nn.Module):
    """Mamba's class: no shared block, the recurrence runs over tokens.

    Notes
    -----
    Per layer ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`` with ``A = -exp(A_log)`` and ``y_t = C_t h_t + D x_t``.
    """

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = MambaModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.backbone.embeddings.weight

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> SimpleNamespace:
        """Return float32 `logits` (batch, seq, vocab) of int64 ids (batch, seq), and `past_key_values`."""
        logits = self.lm_head(self.backbone(input_ids)).float()
        # As in transformers, a cache is kept unless it is declined; here it is empty.
        return SimpleNamespace(logits=logits, past_key_values=None if use_cache is False else ())
