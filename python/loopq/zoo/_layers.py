"""Layers shared by the zoo's models."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``; without a weight when ``affine`` is false."""

    weight: nn.Parameter | None

    def __init__(self, dim: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = (dim,), eps
        if affine:
            self.weight = nn.Parameter(torch.ones(dim))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast a float32 weight would push the whole stream back to float32.
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.dim, weight, self.eps)


def rope_tables(like: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine tables (seq, dim / 2) for ``like`` (batch, seq, d), angles formed in float64."""
    freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
    angle = torch.arange(like.shape[1], dtype=torch.float64, device=like.device)[:, None] * freq
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[2i], x[2i+1])`` of (batch, heads, seq, dim) by the tables' angles."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + dim/2])`` of (batch, heads, seq, dim) by the tables' angles."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Turn (batch, seq, heads * dim) into (batch, heads, seq, dim)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Turn (batch, heads, seq, dim) into (batch, seq, heads * dim)."""
    return x.transpose(1, 2).flatten(-2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention over (batch, heads, seq, dim); fewer k/v heads are repeated."""
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def row_noise(rows: int, shape: tuple[int, ...], std: float, seed: int, first_row: int = 0) -> Tensor:
    """Draw normal noise cut at 3 standard deviations, each row from a stream of its own.

    Row ``i`` depends on ``seed`` and ``first_row + i`` only, so a batch may be cut anywhere.

    Returns
    -------
    float32 array (rows, *shape)
    """
    out = torch.empty(rows, *shape)
    for i in range(rows):
        stream = torch.Generator().manual_seed((seed * 1_000_003 + first_row + i) % 2**63)
        nn.init.trunc_normal_(out[i], std=std, a=-3 * std, b=3 * std, generator=stream)
    return out


def init_linears(model: nn.Module, depth: int) -> None:
    """Draw linear weights normal, std ``1/sqrt(in)``; outputs of branches smaller by ``sqrt(2 depth)``."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = 1.0 / math.sqrt(module.in_features)
            if name.rsplit(".", 1)[-1] in {"proj", "o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h"}:
                std /= math.sqrt(2 * depth)
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.embedding_dim))


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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
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
