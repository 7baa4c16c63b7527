"""The operator and the layer on the CPU, their refusals, and the launch code run through the emulation."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from loopq.cuda import launch, w4a16
from loopq.cuda.layout import pack_w4
from loopq.cuda.plan import A100, GemmShape, Variant, make_plan
from loopq.cuda.tiled import TiledVariant
from loopq.errors import KernelError, LoopqError
from loopq.inference.linear import QuantLinear
from tests.support.cuda.backend import EmulatedBackend
from tests.support.cuda.emulation import compiler
from tests.support.cuda.layers import dense, layer_parts
from tests.support.linear import linear_of

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="NO C++ COMPILER: launches are NOT emulated here; install g++ or set CXX"
)


def operands(group_size: int = 64, tokens: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    codes, scales = layer_parts(group_size=group_size)
    return {
        "x": torch.randn(tokens, 160, generator=torch.Generator().manual_seed(1)).to(dtype),
        "qweight": torch.from_numpy(pack_w4(codes)),
        "scales": torch.from_numpy(scales.T.copy()),
        "bias": None,
        "addend": None,
        "in_features": 160,
        "group_size": group_size,
    }


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


def test_opcheck() -> None:
    codes, scales = layer_parts()
    packed, rows = torch.from_numpy(pack_w4(codes)), torch.from_numpy(scales.T.copy())
    bias, addend = torch.randn(48), torch.randn(2, 3, 48)
    op = torch.ops.loopq.w4a16_linear.default
    for args in (
        (torch.randn(3, 160), packed, rows, None, None, 160, 64),
        (torch.randn(2, 3, 160).bfloat16(), packed, rows, bias, addend, 160, 64, 0, torch.float32),
        (torch.randn(5, 96).half(), packed, rows.half(), bias, None, 160, 64, 64),
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


class NoDevice:
    limits = A100
    ring_stages = None

    def launch(self, *args: object) -> None:
        raise AssertionError("launched what it must refuse")


def at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, starting 4 bytes beyond a multiple of 16."""
    step = 4 // tensor.element_size()
    room = torch.zeros(tensor.numel() + 32, dtype=tensor.dtype)
    skip = (-room.data_ptr() % 16) // tensor.element_size() + step
    moved = room[skip : skip + tensor.numel()].view(tensor.shape)
    moved.copy_(tensor)
    return moved


@pytest.mark.parametrize("name", ["qweight", "scales"])
def test_constants_at_an_odd_address_are_refused(name: str) -> None:
    given = operands()
    product = w4a16.Product(**{**given, name: at_odd_address(given[name])})  # type: ignore[arg-type]
    workspace = launch.Workspace.allocate(1, 64, torch.device("cpu"))
    with pytest.raises(KernelError, match=f"{name} starts at an address that is not a multiple of 16"):
        w4a16.run_linear(NoDevice(), product.checked(), workspace)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(160, 3).bfloat16().t(), "stride 3 along its last dimension"),
        (
            torch.ones(3, 164).bfloat16()[:, :160],
            "row stride of 164 elements; the kernel needs a multiple of 8",
        ),
        (torch.ones(3, 176).bfloat16()[:, 4:164], "x starts at an address that is not a multiple of 16"),
        (torch.ones(3, 2, 176).bfloat16()[:, :1, :160].expand(3, 4, 160), "no uniform row stride"),
    ],
)
def test_what_only_the_kernel_refuses(x: torch.Tensor, message: str) -> None:
    product = w4a16.Product(**{**operands(), "x": x})  # type: ignore[arg-type]

    workspace = launch.Workspace.allocate(1, 64, torch.device("cpu"))
    with pytest.raises(KernelError, match=message):
        w4a16.run_linear(NoDevice(), product.checked(), workspace)


def emulate(backend: EmulatedBackend, x: torch.Tensor, layer: QuantLinear, **more: object) -> torch.Tensor:
    product = dataclasses.replace(layer.product(x), **more)  # type: ignore[arg-type]
    workspace = launch.workspace_for(backend, [product.layer], x.numel() // x.shape[-1], x.device)
    return w4a16.run_linear(backend, product.checked(), workspace)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64, 65, 128])
def test_launches_agree_with_the_reference(tokens: int, dtype: torch.dtype) -> None:
    backend = EmulatedBackend()
    codes, scales = layer_parts(in_features=4128, group_size=128)
    layer = linear_of(codes, scales, 128, 4, bias=np.linspace(-1, 1, 48))
    x = torch.randn(tokens, 4160, generator=torch.Generator().manual_seed(2)).to(dtype)[:, :4128]
    out = emulate(backend, x, layer, out_dtype=torch.float32)
    expected = layer.float().forward(x.float())
    assert torch.linalg.norm(out - expected) < 1e-6 * torch.linalg.norm(expected)
    assert backend.launches == {"loopq_w4a16_gemm" if tokens <= 32 else "loopq_w4a16_tiled": 1}
    shape = GemmShape(48, 0, 4128, 128, 1)
    assert make_plan(shape, backend.limits, False, 4).slices > 1, "this case is meant to split K"


@needs_compiler
def test_many_tokens_are_dequantised_and_multiplied() -> None:
    backend = EmulatedBackend()
    codes, scales = layer_parts(in_features=224, group_size=64)
    layer = linear_of(codes, scales, 64, 4)
    x = torch.randn(5, 53, 224, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = emulate(backend, x, layer)
    assert backend.launches == {"loopq_w4_dequantize": 1}
    rounded = torch.from_numpy(dense(codes, scales, 64)).float().bfloat16()
    assert torch.equal(out, torch.nn.functional.linear(x, rounded))


@needs_compiler
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_kernel_rounds_once(group_size: int, dtype: torch.dtype) -> None:
    codes, scales = layer_parts(out_features=32, in_features=224, group_size=group_size)
    layer = linear_of(codes, scales, group_size, 4)
    out = torch.full((32, 224), torch.nan, dtype=dtype)
    launch.launch_dequantize(EmulatedBackend(), layer.qweight, layer.scales, out, group_size)
    assert torch.equal(out, layer.dequantize().to(dtype))


class LyingBackend(EmulatedBackend):
    """A device on which one output of every product is off by one bit of its smallest digit."""

    def launch(self, kernel: Any, grid: Any, threads: int, shared_bytes: int, args: Any) -> None:
        super().launch(kernel, grid, threads, shared_bytes, args)
        ctypes.c_uint32.from_address(args[3]).value ^= 1


# Those that the emulation is built with.
PROVEN: list[Variant | TiledVariant] = [
    TiledVariant(activation, token_warps, fold, 4, scales)
    for activation, scales, fold in (
        *(("bf16", scales, fold) for scales in ("f32", "bf16") for fold in (0, 1, 2)),
        ("fp16", "f32", 2),
        ("fp16", "fp16", 0),
    )
    for token_warps in (1, 2)
]
PROVEN += [
    Variant("bf16", tiles, fold, 4, bulk)
    for tiles in (1, 2, 4)
    for fold in (0, 1, 2, 3)
    for bulk in (False, True)
] + [
    Variant(activation, 1, fold, 4, bulk, scales)
    for activation, scales in (("bf16", "bf16"), ("bf16", "fp16"), ("fp16", "f32"), ("fp16", "bf16"))
    for fold in (0, 3)
    for bulk in (False, True)
]


@needs_compiler
@pytest.mark.parametrize("variant", PROVEN, ids=str)
def test_a_good_kernel_is_proven_exactly(variant: Variant) -> None:
    backend = EmulatedBackend()
    launch.prove(variant, backend)
    assert backend.launches.total() == 1


@needs_compiler
def test_a_kernel_that_is_wrong_on_a_device_is_refused() -> None:
    for variant, outputs in ((PROVEN[0], 3072), (PROVEN[-1], 384)):
        with pytest.raises(KernelError, match=rf"wrong on cpu, in 1 of {outputs} outputs.*It is not used"):
            launch.prove(variant, LyingBackend())
