"""A small model of Huginn's names, its rollout in float64, and how close a rounded result must come."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from loopq.cuda import fused
from loopq.inference.linear import QuantLinear
from tests.support.linear import linear_of


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spacing(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def assert_rounds_alike(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding step, and equal almost everywhere."""
    assert torch.isfinite(result.float()).all()
    step = spacing(expected.dtype) * expected.float().abs().clamp(min=1e-2)
    assert ((result.float() - expected.float()).abs() <= step).all()
    assert (result != expected).float().mean() < 0.02


WIDTH, HEADS, INNER = 96, 3, 160


def huginn_like(quantized: bool, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> SimpleNamespace:
    """A model with Huginn's names and a width with K no multiple of 64; int4 or plain weights."""
    generator = np.random.default_rng(seed)

    def linear(out_features: int, in_features: int) -> torch.nn.Module:
        codes = generator.integers(-8, 8, (out_features, in_features)).astype(np.int8)
        groups = -(-in_features // 64)
        scales = generator.uniform(0.5, 1.5, (out_features, groups)).astype(np.float32) / (
            5 * in_features**0.5
        )
        layer = linear_of(codes, scales, 64, 4, scale_dtype=torch.bfloat16)
        if quantized:
            return layer
        plain = torch.nn.Linear(in_features, out_features, bias=False)
        plain.weight.data = layer.dequantize()
        return plain.to(dtype)

    def norm() -> SimpleNamespace:
        return SimpleNamespace(weight=torch.from_numpy(generator.uniform(0.5, 1.5, WIDTH)).to(dtype))

    def block() -> SimpleNamespace:
        qk_bias = torch.from_numpy(generator.standard_normal((2, 1, HEADS, WIDTH // HEADS))).to(dtype)
        attn = SimpleNamespace(Wqkv=linear(3 * WIDTH, WIDTH), proj=linear(WIDTH, WIDTH), qk_bias=qk_bias)
        mlp = SimpleNamespace(fc=linear(2 * INNER, WIDTH), proj=linear(WIDTH, INNER))
        return SimpleNamespace(attn=attn, mlp=mlp, **{f"norm_{i}": norm() for i in (1, 2, 3, 4)})

    transformer = SimpleNamespace(adapter=linear(WIDTH, 2 * WIDTH), core_block=[block(), block()])
    config = SimpleNamespace(n_heads=HEADS, norm_eps=1e-6, rope_base=50000.0)
    return SimpleNamespace(transformer=transformer, config=config)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def exact_rollout(
    model: SimpleNamespace, state: torch.Tensor, embedding: torch.Tensor, n_steps: int
) -> torch.Tensor:
    """A direct transcription of the loop in float64, sharing no code with the runner or its reference."""
    tokens = state.shape[1]
    phase = torch.view_as_complex(fused.rotation_table(tokens, WIDTH // HEADS, 50000.0).double())

    def rms(v: torch.Tensor, norm: SimpleNamespace) -> torch.Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()

    def linear(layer: torch.nn.Module, v: torch.Tensor) -> torch.Tensor:
        weight = layer.dequantize() if isinstance(layer, QuantLinear) else layer.weight.detach()
        return v @ weight.double().t()

    def attention(attn: SimpleNamespace, v: torch.Tensor) -> torch.Tensor:
        q, k, w = linear(attn.Wqkv, v).view(-1, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        bias = attn.qk_bias.double()
        q, k = q + bias[0].unsqueeze(2), k + bias[1].unsqueeze(2)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:3], -1, 2)) * phase).flatten(-2)
            for t in (q, k)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, w, is_causal=True)
        return linear(attn.proj, mixed.transpose(1, 2).reshape(v.shape))

    s, e = state.double(), embedding.double()
    for _ in range(n_steps):
        x = linear(model.transformer.adapter, torch.cat((s, e), -1))
        for block in model.transformer.core_block:
            x = rms(attention(block.attn, rms(x, block.norm_1)) + x, block.norm_2)
            gate, up = linear(block.mlp.fc, rms(x, block.norm_3)).chunk(2, -1)
            x = rms(linear(block.mlp.proj, torch.nn.functional.silu(gate) * up) + x, block.norm_4)
        s = x
    return s
