"""Layers that several small models have, beside those of the embedded model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.zoo.layers import causal_attention, merge_heads, rotary_angles, split_heads

Rope = tuple[Tensor, Tensor]


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + dim/2])`` of (batch, heads, seq, dim) by angles (seq, dim / 2)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Rotary(nn.Module):
    """``rotary_emb(x, position_ids)``: cosines and sines (seq, dim / 2) in the type of `x`."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x: Tensor, position_ids: Tensor) -> Rope:
        angles = rotary_angles(position_ids[0], self.dim, self.base)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class SplitAttention(nn.Module):
    """Causal attention with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` and half-rotation RoPE.

    Parameters
    ----------
    dim : int
        Width of the stream.
    n_heads, n_kv_heads : int
        Query heads and key/value heads.
    head_dim : int
        Width of a head; ``n_heads * head_dim`` need not be ``dim``.
    """

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        q = rotate_half(split_heads(self.q_proj(x), self.n_heads), *rope)
        k = rotate_half(split_heads(self.k_proj(x), self.n_kv_heads), *rope)
        v = split_heads(self.v_proj(x), self.n_kv_heads)
        out: Tensor = self.o_proj(merge_heads(causal_attention(q, k, v)))
        return out


class GatedMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, no biases."""

    def __init__(self, dim: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, intermediate, bias=False)
        self.up_proj = nn.Linear(dim, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
