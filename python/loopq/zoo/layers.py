"""Layers of the embedded model, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Names of a residual branch's last linear layer in the published classes.
_BRANCH_OUTPUTS = {"proj", "o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h"}


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = (dim,), eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast a float32 weight would push the whole stream back to float32.
        return F.rms_norm(x, self.dim, self.weight.to(x.dtype), self.eps)


def rotary_angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """Return the rotary angles ``p / base^(2i / dim)`` for positions ``p`` (n,) as float64 (n, dim / 2)."""
    freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    return positions.double()[:, None] * freq


def rotary_table(n_positions: int, dim: int, base: float) -> Tensor:
    """Return float32 cosines and sines of the rotary angles as (1, n_positions, 1, dim / 2, 2)."""
    angles = rotary_angles(torch.arange(n_positions), dim, base)
    return torch.stack((angles.cos(), angles.sin()), -1)[None, :, None].float()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[2i], x[2i+1])`` of (batch, heads, seq, dim) by angles (seq, dim / 2)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Split (batch, seq, heads * dim) into heads, with the head axis second."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Merge the heads of (batch, heads, seq, dim) into the last axis."""
    return x.transpose(1, 2).flatten(-2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention over (batch, heads, seq, dim). Fewer key and value heads are repeated."""
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def init_linears(model: nn.Module, depth: int) -> None:
    """Draw normal linear weights with std ``1/sqrt(in)``. Branch outputs are smaller by ``sqrt(2 depth)``."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = 1.0 / math.sqrt(module.in_features)
            if name.rsplit(".", 1)[-1] in _BRANCH_OUTPUTS:
                std /= math.sqrt(2 * depth)
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.embedding_dim))
