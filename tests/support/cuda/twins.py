"""Plain twins of the fused operations and of a rollout: the same operations and roundings in torch."""

from __future__ import annotations

from typing import Any

import torch

from loopq.cuda.rollout import LoopParts
from loopq.cuda.w4a16 import w4a16_linear_ref
from loopq.inference.linear import QuantLinear


def add_norm_ref(
    a: torch.Tensor,
    residual: torch.Tensor | None,
    weight1: torch.Tensor,
    weight2: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`add_norm` in torch: float32 inside, y and z rounded once each, z computed from the rounded y."""

    def norm(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        factor = 1.0 / torch.sqrt(v.pow(2).mean(-1, keepdim=True) + epsilon)
        return (v * factor * weight.float()).to(a.dtype)

    y = norm(a.float() + (0.0 if residual is None else residual.float()), weight1)
    return y, None if weight2 is None else norm(y.float(), weight2)


def rope_attention_ref(
    qkv: torch.Tensor, qk_bias: torch.Tensor | None, rotation: torch.Tensor, n_heads: int, n_tokens: int
) -> torch.Tensor:
    """`rope_attention` in torch: float32 inside, one rounding at the end."""
    rows = qkv.shape[0]
    head = qkv.shape[1] // (3 * n_heads)
    q, k, v = qkv.float().view(rows // n_tokens, n_tokens, 3, n_heads, head).permute(2, 0, 3, 1, 4)
    if qk_bias is not None:
        bias = qk_bias.float().view(2, 1, n_heads, 1, head)
        q, k = q + bias[0], k + bias[1]
    cosine, sine = rotation[:n_tokens].unbind(-1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1).flatten(-2)

    score = (turn(q) * head**-0.5) @ turn(k).transpose(-1, -2)
    future = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=qkv.device).triu(1)
    weight = torch.softmax(score.masked_fill(future, float("-inf")), dim=-1)
    return (weight @ v).transpose(1, 2).reshape(rows, n_heads * head).to(qkv.dtype)


def swiglu_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """`swiglu` in torch: float32 inside, one rounding at the end."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def reference_rollout(
    parts: LoopParts, state: torch.Tensor, embedding: torch.Tensor, n_steps: int
) -> torch.Tensor:
    """Reference version of `RolloutRunner.run`: the same operations and roundings in torch, on any device.

    Returns
    -------
    torch.Tensor, shape (sequences, tokens, width)
    """
    sequences, tokens, width = state.shape
    s, e = state.reshape(-1, width), embedding.reshape(-1, width)
    for _ in range(n_steps):
        x = _product_ref(parts.adapter, torch.cat((s, e), dim=-1))
        h = add_norm_ref(x, None, parts.blocks[0].norms[0], None, parts.epsilon)[0]
        for index, block in enumerate(parts.blocks):
            following = parts.blocks[index + 1].norms[0] if index + 1 < len(parts.blocks) else None
            qkv = _product_ref(block.wqkv, h)
            attended = rope_attention_ref(qkv, block.qk_bias, parts.rotation, parts.n_heads, tokens)
            branch = _product_ref(block.proj, attended)
            x, normed = add_norm_ref(branch, x, block.norms[1], block.norms[2], parts.epsilon)
            assert normed is not None
            branch = _product_ref(block.mlp_proj, swiglu_ref(_product_ref(block.fc, normed)))
            x, h_next = add_norm_ref(branch, x, block.norms[3], following, parts.epsilon)
            h = x if h_next is None else h_next
        s = x
    return s.view(sequences, tokens, width)


def _product_ref(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, QuantLinear):
        return w4a16_linear_ref(layer.product(x))
    return (x.float() @ layer.weight.detach().float().t()).to(x.dtype)
