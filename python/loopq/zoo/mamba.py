"""A small selective-scan model of Mamba's kind: no shared block, the recurrence runs over tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import ConfigError
from loopq.zoo._layers import RMSNorm
from loopq.zoo._model import ZooConfig, ZooModel


@dataclasses.dataclass
class MambaConfig(ZooConfig):
    """Settings of `ZooMamba`; see `ZooConfig` for the common ones. ``n_steps`` is 1, ``n_heads`` is idle.

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
    looped: ClassVar = False

    n_steps: int = 1
    intermediate_size: int = 256
    n_layers: int = 3
    state_size: int = 8
    dt_rank: int = 8
    conv_kernel: int = 4


def selective_scan(decay: Tensor, drive: Tensor, identity: float = 0.0) -> list[Tensor]:
    """Return the states ``h_t = (identity + decay_t) h_{t-1} + drive_t`` with ``h_{-1} = 0``.

    Parameters
    ----------
    decay, drive : float array (batch, seq, channels, state)
        ``exp(dt_t A)`` and ``dt_t B_t x_t``.
    identity : float
        Strength of an added identity path; 0 is Mamba itself.

    Returns
    -------
    list of float array (batch, channels, state), one per token
    """
    state = torch.zeros_like(drive[:, 0])
    states = []
    for a, b in zip(decay.unbind(1), drive.unbind(1), strict=True):
        state = (a + identity) * state + b if identity else a * state + b
        states.append(state)
    return states


class MambaMixer(nn.Module):
    """Selective state-space mixer; ``dt_proj`` and ``conv1d`` are used through their weights, not called."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        d, inner, n = config.n_embd, config.intermediate_size, config.state_size
        self.widths = [config.dt_rank, n, n]
        self.identity = 0.0
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

    def scan(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        """Return the convolved input (batch, seq, inner), the states, ``C`` (batch, seq, n), the gate."""
        x, z = self.in_proj(x).chunk(2, -1)
        width = self.conv1d.weight.shape[-1]
        padded = F.pad(x.transpose(1, 2), (width - 1, 0))
        x = F.silu(F.conv1d(padded, self.conv1d.weight, self.conv1d.bias, groups=x.shape[-1])).transpose(1, 2)
        rank, b, c = self.x_proj(x).split(self.widths, -1)
        # The scan multiplies hundreds of decays: it runs in float32 whatever the model's type.
        dt = F.softplus(rank.float() @ self.dt_proj.weight.float().T + self.dt_proj.bias.float())
        decay = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A_log.float()))
        drive = (dt * x.float()).unsqueeze(-1) * b.float().unsqueeze(2)
        return x, selective_scan(decay, drive, self.identity), c.float(), z

    def forward(self, x: Tensor) -> Tensor:
        u, states, c, z = self.scan(x)
        y = torch.stack([(h * ct.unsqueeze(1)).sum(-1) for h, ct in zip(states, c.unbind(1), strict=True)], 1)
        out: Tensor = self.out_proj(((y + self.D * u) * F.silu(z)).to(z.dtype))
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


class ZooMamba(ZooModel):
    """Mamba-like byte model.

    Notes
    -----
    Per layer ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`` with ``A = -exp(A_log)`` and
    ``y_t = C_t h_t + D x_t``. The loop runs over tokens inside a layer, so the depth of a rollout is 1.
    """

    config_class = MambaConfig
    config: MambaConfig

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = nn.ModuleDict(
            {
                "embeddings": nn.Embedding(config.vocab_size, config.n_embd),
                "layers": nn.ModuleList(MambaLayer(config) for _ in range(config.n_layers)),
                "norm_f": RMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.backbone["embeddings"].weight, std=config.n_embd**-0.5)
        self.lm_head.weight = self.backbone["embeddings"].weight

    def check_inputs(self, input_ids: Tensor, num_steps: int | None) -> int:
        depth = super().check_inputs(input_ids, num_steps)
        if depth != 1:
            raise ConfigError(f"mamba: the recurrence is over tokens, so num_steps must be 1, got {depth}")
        return depth

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        embeds: Tensor = self.backbone["embeddings"](input_ids)
        return embeds

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Return the embeddings themselves; there is no noise, so ``seed`` changes nothing."""
        return input_embeds

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        x = input_states
        for layer in self.backbone["layers"]:
            x = layer(x)
        return x

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.backbone["norm_f"](latents))
        return logits.float()

    def token_states(self, input_ids: Tensor) -> list[Tensor]:
        """Return the scan's states of every layer, each (batch, seq, inner, state)."""
        x = self.embed_inputs(input_ids)
        found = []
        for layer in self.backbone["layers"]:
            found.append(torch.stack(layer.mixer.scan(layer.norm(x))[1], 1))
            x = layer(x)
        return found

    def set_identity(self, strength: float) -> None:
        """Add an identity path to every scan: ``h_t = (strength + decay_t) h_{t-1} + drive_t``."""
        for layer in self.backbone["layers"]:
            layer.mixer.identity = strength
