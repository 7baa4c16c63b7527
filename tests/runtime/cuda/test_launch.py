"""Launches of the product: addresses, proofs, the operator through an emulated device."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from loopq.errors import KernelError
from loopq.runtime.cuda import launch, w4a16
from loopq.runtime.cuda.plan import A100, GemmShape, Variant, make_plan
from loopq.runtime.cuda.tiled import TiledVariant
from loopq.runtime.linear import QuantLinear
from tests.support.cuda.backend import EmulatedBackend
from tests.support.cuda.cases import TABLE
from tests.support.cuda.layers import dense, layer_parts
from tests.support.cuda.operands import operands
from tests.support.linear import linear_of


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
    size = launch.workspace_size(backend, product.layer, x.numel() // x.shape[-1])
    workspace = launch.Workspace.allocate(*size, x.device)
    return w4a16.run_linear(backend, product.checked(), workspace)


@pytest.mark.kernels
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
    assert make_plan(shape, backend.limits, 4).slices > 1, "this case is meant to split K"


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [3, 16, 33, 130])
def test_a_layer_with_a_table(tokens: int) -> None:
    backend = EmulatedBackend()
    codes, scales = layer_parts(in_features=416, group_size=128)
    layer = linear_of(codes, scales * np.float32([[1], [-1], [1]] * 16), 128, 4, levels=TABLE)
    assert layer.layout == "lq-w4"
    weight = layer.dequantize()
    np.testing.assert_array_equal(
        weight[1], np.float32(TABLE)[codes[1] + 8] / -16 * scales[1].repeat(128)[:416]
    )
    x = torch.randn(tokens, 416, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = emulate(backend, x, layer, out_dtype=torch.float32)
    if tokens > w4a16.INT4_KERNEL_TOKENS:
        assert torch.equal(out, torch.nn.functional.linear(x, weight.bfloat16()).float())
    else:
        exact = x.double() @ weight.double().t()
        assert torch.linalg.norm(out - exact) < 1e-6 * torch.linalg.norm(exact)
    assert torch.equal(layer(x), layer.float().forward(x.float()).bfloat16())


@pytest.mark.kernels
def test_many_tokens_are_dequantised_and_multiplied() -> None:
    backend = EmulatedBackend()
    codes, scales = layer_parts(in_features=224, group_size=64)
    layer = linear_of(codes, scales, 64, 4)
    x = torch.randn(5, 53, 224, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = emulate(backend, x, layer)
    assert backend.launches == {"loopq_w4_dequantize": 1}
    rounded = torch.from_numpy(dense(codes, scales, 64)).float().bfloat16()
    assert torch.equal(out, torch.nn.functional.linear(x, rounded))


@pytest.mark.kernels
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_kernel_rounds_once(group_size: int, dtype: torch.dtype) -> None:
    codes, scales = layer_parts(out_features=32, in_features=224, group_size=group_size)
    layer = linear_of(codes, scales, group_size, 4)
    out = torch.full((32, 224), torch.nan, dtype=dtype)
    launch.launch_dequantize(EmulatedBackend(), layer.product(out), out)
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
        ("bf16-table", "bf16", 0),
        ("bf16-table", "f32", 2),
        ("fp16-table", "fp16", 1),
    )
    for token_warps in (1, 2)
]


PROVEN += [Variant("bf16", tiles, fold, 4) for tiles in (1, 2, 4) for fold in (0, 1, 2, 3)]
PROVEN += [
    Variant(activation, 1, fold, 4, scales)
    for activation, scales in (("bf16", "bf16"), ("bf16", "fp16"), ("fp16", "f32"), ("fp16", "bf16"))
    for fold in (0, 3)
]
PROVEN += [
    Variant(activation, tiles, fold, 4, scales)
    for activation, fold, scales in (
        ("bf16-table", 0, "bf16"),
        ("bf16-table", 3, "f32"),
        ("fp16-table", 1, "fp16"),
    )
    for tiles in (1, 2, 4)
]


@pytest.mark.kernels
@pytest.mark.parametrize("variant", PROVEN, ids=str)
def test_a_good_kernel_is_proven_exactly(variant: Variant) -> None:
    backend = EmulatedBackend()
    launch.prove(variant, backend)
    assert backend.launches.total() == 1


@pytest.mark.kernels
def test_a_kernel_that_is_wrong_on_a_device_is_refused() -> None:
    for variant, outputs in ((PROVEN[0], 3072), (PROVEN[-1], 1536)):
        with pytest.raises(KernelError, match=rf"wrong on cpu, in 1 of {outputs} outputs.*It is not used"):
            launch.prove(variant, LyingBackend())
