"""The layout ``lq-cpu``: products against float64 on the stored codes, its state, and what it refuses.

Bits, block edges and instruction sets are swept in `tests/cpu/matmul.rs`.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from loopq import _native
from loopq.errors import ConfigError, KernelError, NonFiniteError, SolveError
from loopq.layers.transforms import Rotation
from loopq.runtime.linear import QuantLinear
from tests.support.cuda.layers import layer_parts
from tests.support.linear import asymmetric, linear_of

# Relative error in the l2 norm against float64: three bytes of activations, two and a rounded result, one.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 1e-3}
INT8_BOUND = 1.5e-2


def layer_of(bits: int = 4, group_size: int = 64, activations: str = "float", **more: object) -> QuantLinear:
    codes, scales = layer_parts(48, 160, group_size, bits)
    return linear_of(codes, scales, group_size, bits, layout="lq-cpu", activations=activations, **more)  # type: ignore[arg-type]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def error(layer: QuantLinear, x: torch.Tensor) -> float:
    with torch.inference_mode():
        got = layer(x)
    assert got.dtype == x.dtype
    assert got.shape == (*x.shape[:-1], layer.out_features)
    inputs = (x if layer.transform is None else layer.transform(x)).double()
    exact = inputs @ layer.dequantize().double().t() + (0 if layer.bias is None else layer.bias)
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 8, 64])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_products_of_symmetric_layers(bits: int, group_size: int, dtype: torch.dtype) -> None:
    layer = layer_of(bits, group_size, bias=np.linspace(-1, 1, 48))
    assert error(layer, drawn(2, 3, 160, dtype=dtype)) < BOUNDS[dtype]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("transform", [None, Rotation(20, "hadamard", 4)])
def test_products_of_asymmetric_and_transformed_layers(bits: int, transform: Rotation | None) -> None:
    given, _ = asymmetric(bits)
    layer = linear_of(**given, transform=transform, layout="lq-cpu")
    assert error(layer, drawn(7, 20)) < BOUNDS[torch.float32]
    assert torch.equal(layer.codes(), torch.from_numpy(given["codes"]))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["lq-cpu", "codes"])
def test_rows_are_those_of_the_dequantized_weight(bits: int, layout: str) -> None:
    given, _ = asymmetric(bits)
    codes, scales = layer_parts()
    for layer in (
        linear_of(**given, layout=layout),
        linear_of(codes >> 8 - bits if bits > 4 else codes >> 4 - bits, scales, 64, bits, layout=layout),
    ):
        ids = torch.tensor([layer.out_features - 1, 0, 33 % layer.out_features, 0])
        assert torch.equal(layer.rows(ids), layer.dequantize()[ids])


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_read_in_the_type_that_they_are_stored_in(scale_dtype: torch.dtype) -> None:
    layer = layer_of(scale_dtype=scale_dtype)
    assert layer.scales.dtype == scale_dtype
    assert error(layer, drawn(1, 160)) < BOUNDS[torch.float32]


def test_int8_activations_are_asked_for_and_shown() -> None:
    layer = layer_of(activations="int8")
    assert 1e-4 < error(layer, drawn(5, 160)) < INT8_BOUND
    assert "activations='int8'" in repr(layer)
    codes, scales = layer_parts()
    with pytest.raises(ConfigError, match=r"runs on the processor, in layout 'lq-cpu'.*'lq-w4'"):
        linear_of(codes, scales, 64, 4, activations="int8")
    with pytest.raises(ConfigError, match="'float' or 'int8'; got 'int4'"):
        linear_of(codes, scales, 64, 4, layout="lq-cpu", activations="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keep the model on the CPU"):
        layer.to("meta")


def test_threads_and_batches_change_no_bit() -> None:
    layer, x = layer_of(), drawn(70, 160, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), results[0])


def test_large_layers_in_separate_memory_are_the_same() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(-8, 8, (2048, 2560), dtype=np.int8)
    layer = linear_of(codes, np.full((2048, 20), 0.01, np.float32), 128, 4, layout="lq-cpu")
    assert layer.qweight.numel() > 2 << 20
    assert layer.qweight.data_ptr() % 64 == 0
    assert np.array_equal(layer.codes().numpy(), codes)
    assert error(layer, drawn(2, 2560)) < BOUNDS[torch.float32]


def test_state_copies_and_strides() -> None:
    layer = layer_of(bias=np.ones(48))
    x = drawn(3, 320)[:, ::2]
    expected = layer(x)
    other = linear_of(
        np.zeros((48, 160), np.int8), np.ones((48, 3), np.float32), 64, 4, np.zeros(48), layout="lq-cpu",
        scale_dtype=layer.scales.dtype,
    )  # fmt: skip
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x.contiguous()), expected)
    assert torch.equal(layer.to(torch.bfloat16)(x), expected)
    assert layer(x[:0]).shape == (0, 48)
    assert layer(x[0]).shape == (48,)


def test_a_layer_moved_off_the_processor_is_packed_again() -> None:
    assert layer_of().to("meta").layout == "lq-w4"
    assert layer_of(bits=3).to("meta").layout == "codes"


def test_refusals() -> None:
    layer = layer_of()
    with pytest.raises(KernelError, match="have no gradient"):
        layer(drawn(2, 160).requires_grad_())
    with pytest.raises(ConfigError, match=r"x: expected \(tokens, 160\), got \(2, 161\)"):
        layer(drawn(2, 161))
    codes, scales = layer_parts()
    with pytest.raises(ConfigError, match="layout 'lq-w5' does not take"):
        linear_of(codes, scales, 64, 4, layout="lq-w5")


def test_the_layouts_own_refusals() -> None:
    layout = _native.CpuLayout(48, 160, _native.Grid(bits=4, group_size=64))
    half = _native.CpuLayout(48, 160, _native.Grid(bits=4, group_size=64, scale_dtype="float16"))
    codes, scales = layer_parts()
    packed = np.zeros(layout.n_bytes, np.uint8)
    with pytest.raises(TypeError, match="out must be a writable, contiguous array of uint8"):
        layout.pack(codes, scales, packed[::2])
    with pytest.raises(ConfigError, match="the packed weight: expected 2 x"):
        layout.pack(codes, scales, packed[:-1])
    for bad, error, message in (
        (np.nan, NonFiniteError, "scales holds NaN at row 1, column 2"),
        (-np.inf, NonFiniteError, "scales holds -inf at row 1, column 2"),
        (1e9, SolveError, "1e9 of row 1, group 2 is infinite in float16"),
    ):
        wrong = scales.copy()
        wrong[1, 2] = bad
        with pytest.raises(error, match=message):
            half.pack(codes, wrong, np.zeros(half.n_bytes, np.uint8))
    x, out = np.zeros((1, 160), np.float32), np.zeros((1, 48), np.float32)
    with pytest.raises(ConfigError, match=r"precision = .*'int8', 'fixed16', 'fixed24'"):
        layout.multiply(packed, x, out, precision="int4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out must be a writable"):
        layout.multiply(packed, x, out.astype(np.float64), precision="int8")
    with pytest.raises(ConfigError, match="the packed weight: expected 2 x"):
        layout.rows(packed[:-1], np.array([0]))
    streams = _native.CpuLayout(64, 32, _native.Grid(bits=2, group_size=32, trellis=(8, 32)))
    with pytest.raises(ConfigError, match=r"rows = .*plain grid"):
        streams.rows(np.zeros(streams.n_bytes, np.uint8), np.array([0]))
    with pytest.raises(TypeError, match="x must be a matrix"):
        layout.multiply(packed, x.astype(np.float16), out, precision="int8")


def test_reading_adds_up_words() -> None:
    words = np.random.default_rng(0).integers(0, 2**63, 1000, dtype=np.uint64)
    expected = (3 * int(words.sum(dtype=object))) % 2**64
    assert _native.cpu_read(words.view(np.uint8), 3, 2) == expected
