"""`PackedLinear`: the layer of asymmetric codes and transformed inputs, against its dequantized weight."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loopq._native as native
from loopq.errors import ConfigError
from loopq.kernels.reference import PackedLinear, unpack_stream
from loopq.rotation import ChannelScale, Rotation
from loopq.systems.quantized import install


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 5), st.integers(1, 100), st.integers(0, 99))
def test_stream_is_read_as_it_was_packed(bits, rows, columns, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    codes[0, -1] = (1 << bits) - 1
    words = torch.from_numpy(native.pack_dense(codes, bits, 0))
    np.testing.assert_array_equal(unpack_stream(words, bits, columns).numpy(), codes)


def made(bits=3, rows=6, columns=20, group=8, seed=0):
    """Codes, scales and zero points, their module, and the weight by its definition in float64."""
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else -(-columns // group)
    codes = rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    zeros = rng.integers(0, 1 << bits, (rows, groups)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.2, (rows, groups)).astype(np.float16).astype(np.float32)
    index = np.arange(columns) // (columns if group == -1 else group)
    weight = (codes.astype(float) - zeros[:, index]) * scales[:, index]
    packed = native.pack_dense(codes, bits, 0)
    return (packed, scales, zeros), {"in_features": columns, "group_size": group, "bits": bits}, weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [-1, 8, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_equals_its_definition(bits, group, bias):
    arrays, sizes, weight = made(bits, group=group)
    b = torch.linspace(-1, 1, 6) if bias else None
    module = PackedLinear(*arrays, **sizes, bias=b)
    np.testing.assert_array_equal(module.stored_weight().numpy(), weight.astype(np.float32))
    x = torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(0))
    expected = x.double().numpy() @ weight.T + (b.double().numpy() if bias else 0)
    np.testing.assert_allclose(module(x).numpy(), expected, rtol=1e-5, atol=1e-5)
    assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "transform",
    [
        Rotation(20, "hadamard", 8),
        Rotation(20, "random", 7, seed=3),
        ChannelScale(np.linspace(0.5, 2, 20).astype("f4")),
    ],
)
def test_input_is_transformed_at_run_time(transform):
    arrays, sizes, weight = made()
    module = PackedLinear(*arrays, **sizes, transform=transform)
    plain = transform.unfold(weight.astype(np.float32))
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(module(x).numpy(), x.numpy() @ plain.T, rtol=1e-4, atol=1e-4)
    assert not np.allclose(plain, weight, atol=1e-3)
    again = PackedLinear(*made(seed=5)[0], **sizes, transform=transform)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), module(x))


def test_types_survive_a_change_of_the_model_s_type():
    arrays, sizes, _ = made()
    module = PackedLinear(*arrays, **sizes, transform=Rotation(20, "hadamard", 4))
    before = {n: (t.dtype, t.clone()) for n, t in module.named_buffers()}
    module.bfloat16().double()
    for name, tensor in module.named_buffers():
        assert tensor.dtype == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert before["scales"][0] == torch.float16
    assert before["packed"][1].numel() * 4 == 6 * 8, "20 codes of 3 bits in two words"


def test_what_does_not_fit_is_refused():
    (packed, scales, zeros), sizes, _ = made()
    for wrong in (
        (packed[:, 1:], scales, zeros),
        (packed, scales[:, 1:], zeros),
        (packed, scales, zeros[1:]),
    ):
        with pytest.raises(ConfigError, match=r"expected \(6, 2\), \(6, 3\)"):
            PackedLinear(*wrong, **sizes)
    with pytest.raises(ConfigError, match="no module applies an input transform of type object"):
        PackedLinear(packed, scales, zeros, **sizes, transform=object())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rotated", [False, True])
def test_install_chooses_the_module(symmetric, rotated):
    from loopq.checkpoint.layer import QuantizedLayer
    from loopq.checkpoint.native import Checkpoint

    (_, scales, zeros), _, _ = made()
    codes = np.random.default_rng(0).integers(0, 8, (6, 20))
    stored = (codes - 4).astype(np.int8) if symmetric else codes.astype(np.uint8)
    layer = QuantizedLayer(
        "a.weight", 3, 8, symmetric, stored, scales, None if symmetric else zeros, "float16"
    )
    if rotated:
        layer = dataclasses.replace(layer, transform=Rotation(20, "hadamard", 4))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(20, 6)})
    bias = model["a"].bias
    assert install(model, Checkpoint({"a.weight": layer}, {}, {}, {})) == {}
    assert type(model["a"]).__name__ == ("QuantLinear" if symmetric and not rotated else "PackedLinear")
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(2))
    expected = torch.nn.functional.linear(x, torch.from_numpy(layer.dequantize()), bias)
    torch.testing.assert_close(model["a"](x), expected, rtol=1e-4, atol=1e-4)
