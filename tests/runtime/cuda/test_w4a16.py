"""The operator: its reference, its rules, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import KernelError, LoopqError
from loopq.runtime.cuda import w4a16
from loopq.runtime.cuda.layout import pack_w4
from tests.support.cuda.cases import TABLE
from tests.support.cuda.layers import dense, layer_parts
from tests.support.cuda.operands import operands


def call(**changes: object) -> torch.Tensor:
    return w4a16.w4a16_linear(**{**operands(), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_reference_is_the_product(group_size: int, dtype: torch.dtype) -> None:
    given = operands(group_size, dtype=dtype)
    codes, scales = layer_parts(group_size=group_size)
    x = given["x"]
    assert isinstance(x, torch.Tensor)
    expected = x.double().numpy() @ dense(codes, scales, group_size).T
    out = call(**given, out_dtype=torch.float32)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-4)
    assert call(**given).dtype == dtype


def test_reference_with_a_table() -> None:
    codes, scales = layer_parts(group_size=64)
    given = operands(64, dtype=torch.float32)
    x = given["x"]
    assert isinstance(x, torch.Tensor)
    weight = dense(np.array(TABLE)[codes + 8] / 16, scales, 64)
    out = call(**given, levels=TABLE)
    np.testing.assert_allclose(out.numpy(), x.double().numpy() @ weight.T, rtol=1e-5, atol=1e-3)


def test_opcheck() -> None:
    codes, scales = layer_parts()
    packed, rows = torch.from_numpy(pack_w4(codes)), torch.from_numpy(scales.T.copy())
    bias, addend = torch.randn(48), torch.randn(2, 3, 48)
    op = torch.ops.loopq.w4a16_linear.default
    for args in (
        (torch.randn(3, 160), packed, rows, None, None, 160, 64),
        (torch.randn(2, 3, 160).bfloat16(), packed, rows, bias, addend, 160, 64, 0, torch.float32),
        (torch.randn(5, 96).half(), packed, rows.half(), bias, None, 160, 64, 64),
        (torch.randn(3, 160), packed, rows, None, None, 160, 64, 0, None, list(TABLE)),
    ):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": torch.zeros(3, 384)}, "packed weight is torch.float32; expected int32"),
        (
            {"qweight": torch.zeros(3, 256, dtype=torch.int32)},
            r"does not hold 160 inputs: expected \(out / 16, 384\)",
        ),
        ({"scales": torch.ones(3, 48, dtype=torch.float64)}, "scales are torch.float64"),
        ({"scales": torch.ones(48, 3)}, r"expected \(3, 48\), group by output"),
        ({"group_size": 48}, "group sizes 32, 64, 128"),
        ({"x": torch.ones(3, 160, dtype=torch.int32)}, "a floating-point type is needed"),
        ({"x": torch.ones(3, 150)}, "150 features from input 0 on"),
        ({"x": torch.ones(3, 192)}, "192 features from input 0 on"),
        ({"k_begin": 16}, "160 features from input 16 on"),
        ({"levels": range(15)}, "a table has 16 levels"),
        ({"levels": range(-128, -112)}, "of -127..127"),
        ({"bias": torch.ones(48).bfloat16()}, "bias is torch.bfloat16"),
        ({"bias": torch.ones(47)}, r"expected float32 \(48,\)"),
        ({"addend": torch.ones(2, 48)}, r"addend is torch.float32 \(2, 48\); expected float32 \(3, 48\)"),
        ({"qweight": torch.zeros(3, 384, dtype=torch.int32, device="meta")}, "qweight is on meta, x on cpu"),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoopqError, match=message):
        call(**changes)


@pytest.mark.parametrize("name", ["qweight", "scales", "bias"])
def test_constants_that_are_not_contiguous_are_refused(name: str) -> None:
    """A kernel reads them by pointer: strides would give a wrong answer."""
    given = {**operands(), "bias": torch.ones(48)}
    whole = given[name]
    assert isinstance(whole, torch.Tensor)
    apart = torch.stack((whole, whole), dim=-1)[..., 0]
    assert torch.equal(apart, whole)
    with pytest.raises(KernelError, match=f"{name} is not contiguous"):
        call(**{**given, name: apart})


def test_only_floating_output_of_the_kernels_types_on_a_gpu() -> None:
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in operands().items()
    }
    with pytest.raises(KernelError, match=r"output torch.float16 from torch.bfloat16"):
        call(**meta, out_dtype=torch.float16)
    with pytest.raises(KernelError, match="the kernel takes bfloat16 and float16"):
        call(**{**meta, "x": torch.ones(3, 160, device="meta")})
    assert call(**meta).device.type == "meta"


def test_another_kind_of_device_is_refused() -> None:
    class Elsewhere:
        device = torch.device("mps", 0)

    with pytest.raises(KernelError, match="x is on mps:0; there are implementations for cpu, cuda, meta"):
        call(x=Elsewhere())
