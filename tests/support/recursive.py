"""TRM's and HRM's published classes in small: plain torch, linears of their own, a carry between root calls."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benches.zoo.models.layers import rotate_half
from loopq.zoo.layers import merge_heads, rotary_angles, split_heads


class CastedLinear(nn.Module):
    """A linear that casts its weight at each call; no `nn.Linear`."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class PostNormBlock(nn.Module):
    """TRM's block: no norm weights, not causal."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj, self.self_attn.o_proj = CastedLinear(32, 96), CastedLinear(32, 32)
        self.mlp.gate_up_proj, self.mlp.down_proj = CastedLinear(32, 96), CastedLinear(48, 32)

    def forward(self, cos_sin: Any, hidden_states: Tensor) -> Tensor:
        q, k, v = (split_heads(p, 2) for p in self.self_attn.qkv_proj(hidden_states).chunk(3, -1))
        q, k = rotate_half(q, *cos_sin), rotate_half(k, *cos_sin)
        y = self.self_attn.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        x = F.rms_norm(hidden_states + y, (32,))
        gate, up = self.mlp.gate_up_proj(x).chunk(2, -1)
        return F.rms_norm(x + self.mlp.down_proj(F.silu(gate) * up), (32,))


class Net(nn.Module):
    """`net(z, injection)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PostNormBlock() for _ in range(2))

    def forward(self, hidden_states: Tensor, input_injection: Tensor, **kwargs: Any) -> Tensor:
        x = hidden_states + input_injection
        for layer in self.layers:
            x = layer(hidden_states=x, **kwargs)
        return x


@dataclasses.dataclass
class Carry:
    """State between calls of the root forward."""

    z_H: Tensor
    z_L: Tensor
    steps: Tensor
    halted: Tensor


class RecursiveInner(nn.Module):
    """`inner` of TRM; with `two` nets, of HRM."""

    def __init__(self, config: SimpleNamespace, two: bool) -> None:
        super().__init__()
        self.config, self.puzzle_emb_len = config, 0
        self.embed_tokens = nn.Embedding(64, 32)
        self.lm_head, self.q_head = CastedLinear(32, 64), CastedLinear(32, 2)
        self.L_level = Net()
        if two:
            self.H_level = Net()
        angles = rotary_angles(torch.arange(config.seq_len), 16, 10_000.0).float()
        self.register_buffer("tables", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.register_buffer("H_init", torch.randn(32))
        self.register_buffer("L_init", torch.randn(32))

    def rotary_emb(self) -> tuple[Tensor, Tensor]:
        return self.tables[0], self.tables[1]

    def _input_embeddings(self, ids: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        return math.sqrt(32) * self.embed_tokens(ids)

    def forward(self, z_H: Tensor, z_L: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        e = self._input_embeddings(batch["inputs"], batch["puzzle_identifiers"])
        upper = getattr(self, "H_level", self.L_level)
        for _ in range(self.config.H_cycles):
            for _ in range(self.config.L_cycles):
                z_L = self.L_level(z_L, z_H + e, cos_sin=self.rotary_emb())
            z_H = upper(z_H, z_L, cos_sin=self.rotary_emb())
        self.q_head(z_H[:, 0])
        return z_H, z_L, self.lm_head(z_H)


class RecursiveModel(nn.Module):
    """Root class of TRM and HRM: a carry comes in and goes out; finished rows start again."""

    def __init__(self, two: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(H_cycles=2, L_cycles=3, halt_max_steps=4, seq_len=10)
        self.inner = RecursiveInner(self.config, two)

    def initial_carry(self, batch: dict[str, Tensor]) -> Carry:
        rows = batch["inputs"].shape[0]
        empty = torch.full((rows, self.config.seq_len, 32), float("nan"), dtype=self.inner.H_init.dtype)
        return Carry(empty, empty, torch.zeros(rows), torch.ones(rows, dtype=torch.bool))

    def forward(self, carry: Carry, batch: dict[str, Tensor]) -> tuple[Carry, dict[str, Tensor]]:
        reset = carry.halted[:, None, None]
        z_H = torch.where(reset, self.inner.H_init, carry.z_H)
        z_L = torch.where(reset, self.inner.L_init, carry.z_L)
        z_H, z_L, logits = self.inner(z_H, z_L, batch)
        steps = torch.where(carry.halted, 0, carry.steps) + 1
        return Carry(z_H, z_L, steps, steps >= self.config.halt_max_steps), {"logits": logits}
