"""Operations between the products: norms, attention, SwiGLU."""

from __future__ import annotations

import pytest
import torch

from loopq.cuda import fused
from loopq.errors import KernelError
from tests.support.cuda import twins
from tests.support.cuda.backend import EmulatedBackend
from tests.support.cuda.rollout import (
    assert_rounds_alike,
    draw,
    spacing,
)

pytestmark = pytest.mark.kernels


TYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [8, 264, 5280, 16384])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_norm(width: int, second: bool, with_residual: bool, dtype: torch.dtype) -> None:
    a = draw(2, width + 8, dtype=dtype)[:, :width]
    residual = draw(2, width, seed=1, dtype=dtype) if with_residual else None
    w1, w2 = draw(width, seed=2, dtype=dtype), draw(width, seed=3, dtype=dtype) if second else None
    y = torch.full((2, width + 16), torch.nan, dtype=dtype)
    z = torch.full((2, width), torch.nan, dtype=dtype) if second else None
    fused.add_norm(EmulatedBackend(), a, residual, w1, y[:, :width], None if z is None else (w2, z), 1e-6)
    expected_y, expected_z = twins.add_norm_ref(a, residual, w1, w2, 1e-6)
    assert_rounds_alike(y[:, :width], expected_y)
    assert torch.isnan(y[:, width:]).all()
    if z is not None:
        assert expected_z is not None
        # z starts from the kernel's own rounded y, which may differ from the reference's in a last bit.
        again = twins.add_norm_ref(y[:, :width], None, w2, None, 1e-6)[0] if w2 is not None else None
        assert again is not None
        assert_rounds_alike(z, again)


def test_add_norm_in_place() -> None:
    stream, branch, w1, w2 = draw(3, 96), draw(3, 96, seed=1), draw(96, seed=2), draw(96, seed=3)
    expected, _ = twins.add_norm_ref(branch, stream, w1, w2, 1e-6)
    normed = torch.empty_like(stream)
    fused.add_norm(EmulatedBackend(), branch, stream, w1, stream, (w2, normed), 1e-6)
    assert_rounds_alike(stream, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "head"),
    [(1, 1, 1, 2), (2, 7, 3, 96), (1, 16, 2, 64), (1, 33, 1, 128), (1, 64, 1, 32)],
)
def test_rope_attention(sequences: int, tokens: int, heads: int, head: int, dtype: torch.dtype) -> None:
    rows = sequences * tokens
    qkv = draw(rows, 3 * heads * head + 8, dtype=dtype)[:, : 3 * heads * head]
    if qkv.stride(0) % 8:
        qkv = draw(rows, 8, dtype=dtype)[:, :6]
    bias = draw(2, heads, head, seed=1, dtype=dtype)
    rotation = fused.rotation_table(tokens + 3, head, 50000.0)
    out = torch.full((rows, max(8, heads * head)), torch.nan, dtype=dtype)[:, : heads * head]
    for qk_bias in (None, bias):
        fused.rope_attention(EmulatedBackend(), qkv, qk_bias, rotation, out, heads, tokens)
        expected = twins.rope_attention_ref(qkv, qk_bias, rotation, heads, tokens)
        difference = (out.float() - expected.float()).abs().max()
        assert difference <= 2 * spacing(dtype) * expected.float().abs().max()


def test_attention_reference_against_torch() -> None:
    """The reference itself against scaled_dot_product_attention and complex rotation."""
    heads, head, tokens = 3, 8, 5
    qkv = draw(tokens, 3 * heads * head, dtype=torch.float32)
    rotation = fused.rotation_table(tokens, head, 50000.0)
    q, k, v = qkv.view(tokens, 3, heads, head).permute(1, 2, 0, 3)
    phase = torch.view_as_complex(rotation)
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.reshape(heads, tokens, -1, 2)) * phase).flatten(-2)
        for t in (q, k)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = twins.rope_attention_ref(qkv, None, rotation, heads, tokens)
    torch.testing.assert_close(out, expected.transpose(0, 1).reshape(tokens, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 264), (16, 96)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = draw(rows, 2 * width, dtype=dtype) * 4
    out = torch.full((rows, width), torch.nan, dtype=dtype)
    fused.swiglu(EmulatedBackend(), gate_up, out)
    assert_rounds_alike(out, twins.swiglu_ref(gate_up))
    expected = torch.nn.functional.silu(gate_up[:, :width].float()) * gate_up[:, width:].float()
    torch.testing.assert_close(out.float(), expected, rtol=2 * spacing(dtype), atol=1e-6)


def test_fused_operations_refuse() -> None:
    backend = EmulatedBackend()
    with pytest.raises(KernelError, match="width 12 must be a multiple of 8"):
        fused.add_norm(backend, draw(8, 16)[:, :12], None, draw(12), draw(8, 16)[:, :12], None, 1e-6)
    with pytest.raises(KernelError, match="row stride that is a multiple of 8"):
        fused.swiglu(backend, draw(2, 36)[:, :32], draw(2, 16))
    with pytest.raises(KernelError, match="up to 64 tokens"):
        fused.rope_attention(
            backend, draw(65, 48), None, fused.rotation_table(65, 16, 1e4), draw(65, 16), 1, 65
        )
    with pytest.raises(KernelError, match=r"expected float32 \(at least 4, 8, 2\)"):
        fused.rope_attention(backend, draw(4, 48), None, fused.rotation_table(3, 16, 1e4), draw(4, 16), 1, 4)
    with pytest.raises(KernelError, match="takes bfloat16 and float16"):
        fused.swiglu(backend, torch.zeros(2, 32), torch.zeros(2, 16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": draw(96).float()}, "weight is torch.float32 on cpu; expected torch.bfloat16"),
        ({"weight": draw(192)[::2]}, "weight has shape .* contiguous"),
        ({"weight": draw(95)}, r"expected \(96,\)"),
        ({"residual": draw(1, 96)}, r"residual has shape \(1, 96\); expected \(2, 96\)"),
        ({"y": torch.empty(2, 96)}, "y is torch.float32"),
        ({"y": torch.empty(2, 96, dtype=torch.bfloat16, device="meta")}, "y is torch.bfloat16 on meta"),
        ({"second": (draw(95), draw(2, 96))}, r"weight2 has shape .* expected \(96,\)"),
        ({"second": (draw(96), draw(1, 96))}, r"z has shape \(1, 96\); expected \(2, 96\)"),
    ],
)
def test_add_norm_refuses(changes: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "a": draw(2, 96),
        "residual": None,
        "weight": draw(96),
        "y": draw(2, 96),
        "second": None,
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        fused.add_norm(EmulatedBackend(), *given.values(), 1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_bias": draw(2, 1, 16).float()}, "qk_bias is torch.float32"),
        ({"qk_bias": draw(2, 1, 32)[..., ::2]}, "qk_bias has shape"),
        ({"qk_bias": draw(2, 16)}, r"expected \(2, 1, 16\)"),
        ({"qkv": draw(4, 64)}, r"qkv has shape \(4, 64\); expected \(4, 48\)"),
        ({"out": draw(8, 16)}, r"out has shape \(8, 16\)"),
        ({"rotation": fused.rotation_table(4, 16, 1e4).to("meta")}, "on meta; expected float32"),
    ],
)
def test_attention_refuses(changes: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "qkv": draw(4, 48),
        "qk_bias": None,
        "rotation": fused.rotation_table(4, 16, 1e4),
        "out": draw(4, 16),
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        fused.rope_attention(EmulatedBackend(), *given.values(), 1, 4)  # type: ignore[arg-type]
