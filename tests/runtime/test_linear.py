"""`QuantLinear` against the weight that its codes stand for: layouts, zero points, transforms, types, refusals."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from loopq.errors import ConfigError
from loopq.layers.grids import even
from loopq.layers.transforms import Rotation
from loopq.runtime.layout import Held
from loopq.runtime.linear import LAYOUTS, _first_fit
from tests.support.cuda.layers import dense, layer_parts
from tests.support.linear import asymmetric, linear_of


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"group_size": -1}, True),
        ({"group_size": 48}, False),
        ({"bits": 3}, False),
        ({"out_features": 24}, False),
        ({"in_features": 80}, False),
        ({"symmetric": False}, False),
    ],
)
def test_what_the_int4_kernel_takes(changes, fits):
    given = {"out_features": 48, "in_features": 160} | changes
    fields = {"bits": 4, "group_size": 64, "symmetric": True, "scale_dtype": "float16"}
    grid = even(**{name: given.pop(name, value) for name, value in fields.items()})
    assert LAYOUTS["lq-w4"].fits(Held(**given, grid=grid)) is fits


@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.bfloat16, "lq-w4"), (torch.float16, "lq-w4"), (torch.float32, "codes")]
)
def test_a_gpu_gets_the_int4_kernel_for_16_bit_activations(dtype, layout):
    grid = even(bits=4, group_size=64, symmetric=True, scale_dtype="float16")
    warned = pytest.warns(UserWarning, match="as bfloat16") if layout == "codes" else contextlib.nullcontext()
    with warned:
        assert _first_fit(Held(48, 160, grid), "cuda", dtype) == layout


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"), [(48, 160, 64), (10, 70, 32), (16, 64, -1)]
)
def test_symmetric_layers_multiply_by_codes_times_scales(
    bits: int, out_features: int, in_features: int, group_size: int
) -> None:
    codes, scales = layer_parts(out_features, in_features, group_size, bits)
    layer = linear_of(codes, scales, group_size, bits, bias=np.ones(out_features))
    fits = bits == 4 and out_features % 16 == 0 and in_features % 32 == 0
    assert layer.layout == ("lq-w4" if fits else "codes")
    assert torch.equal(layer.codes(), torch.from_numpy(codes))
    x = torch.randn(2, 3, in_features, generator=torch.Generator().manual_seed(4))
    expected = x.double().numpy() @ dense(codes, scales, group_size).T + 1
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-4, atol=1e-4 * 2**bits)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_scales_are_kept_exactly_in_the_fewest_bits() -> None:
    codes, scales = layer_parts()
    coarse = np.round(scales * 64) / 64
    assert linear_of(codes, coarse, 64, 4).scales.dtype == torch.bfloat16
    finer = np.round(scales * 512) / 512
    assert linear_of(codes, finer, 64, 4).scales.dtype == torch.float16
    assert linear_of(codes, scales, 64, 4).scales.dtype == torch.float32
    assert linear_of(codes, scales, 64, 4, scale_dtype=torch.bfloat16).scales.dtype == torch.bfloat16


def test_state_moves_and_loads() -> None:
    codes, scales = layer_parts()
    layer = linear_of(codes, scales, 64, 4, bias=torch.ones(48))
    other = linear_of(np.zeros_like(codes), np.ones_like(scales), 64, 4, bias=torch.zeros(48))
    other.load_state_dict(layer.state_dict())
    x = torch.ones(1, 160)
    expected = layer(x)
    assert torch.equal(other(x), expected)
    assert layer.to(torch.bfloat16).scales.dtype == torch.float32
    assert torch.equal(layer.half()(x), expected)
    assert layer.to("meta").scales.device.type == "meta"
    assert "bits=4" in repr(layer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, r"bits must be one of \(2, 3, 4, 8\)"),
        ({"bits": 3}, r"3-bit codes lie in -4\.\.3"),
        ({"group_size": 0}, "group_size must be positive"),
        ({"group_size": 32}, r"scales of shape \(48, 3\); expected \(48, 5\)"),
        ({"codes": np.zeros(8, np.int8)}, r"codes are int8 of shape \(8,\)"),
        ({"codes": np.zeros((48, 160), np.int64)}, r"codes are int64 of shape \(48, 160\); expected int8"),
        ({"bias": np.zeros(3)}, r"bias of shape \(3,\)"),
    ],
)
def test_from_layer_refuses(changes: dict[str, object], message: str) -> None:
    codes, scales = layer_parts()
    given = {"codes": codes, "scales": scales, "group_size": 64, "bits": 4, **changes}
    with pytest.raises(ConfigError, match=message):
        linear_of(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 8, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_asymmetric_layers_equal_their_definition(bits, group_size, bias):
    given, weight = asymmetric(bits, group_size=group_size)
    b = torch.linspace(-1, 1, 6) if bias else None
    layer = linear_of(**given, bias=b)
    assert torch.equal(layer.codes(), torch.from_numpy(given["codes"]))
    np.testing.assert_array_equal(layer.dequantize().numpy(), weight.astype(np.float32))
    x = torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(0))
    expected = x.double().numpy() @ weight.T + (b.double().numpy() if bias else 0)
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-5, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_types_survive_a_change_of_the_models_type():
    given, _ = asymmetric()
    layer = linear_of(**given, transform=Rotation(20, "hadamard", 4))
    before = {n: (t.dtype, t.clone()) for n, t in layer.named_buffers()}
    layer.bfloat16().double()
    for name, tensor in layer.named_buffers():
        assert tensor.dtype == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert {n: str(t[0]).removeprefix("torch.") for n, t in before.items()} == {
        "qweight": "uint8", "scales": "float16", "zeros": "uint8", "transform.rotation_4_0": "float32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": np.zeros((6, 20), np.int8)}, r"codes are int8 of shape \(6, 20\); expected uint8"),
        ({"codes": np.full((6, 20), 8, np.uint8)}, r"3-bit codes lie in 0\.\.7; got 8\.\.8"),
        (
            {"zeros": np.zeros((6, 2), np.uint8)},
            r"zero points are uint8 of shape \(6, 2\); expected uint8 \(6, 3\)",
        ),
        ({"zeros": np.zeros((6, 3), np.int32)}, "zero points are int32"),
        ({"transform": object()}, "no module applies an input transform of type object"),
    ],
)
def test_asymmetric_and_transformed_layers_refuse(changes, message):
    given, _ = asymmetric()
    with pytest.raises(ConfigError, match=message):
        linear_of(**given | changes)
