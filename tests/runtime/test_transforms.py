"""Inputs are transformed at run time."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from loopq.layers.transforms import ChannelScale, Rotation
from loopq.runtime.transforms import InputTransform
from tests.support.linear import asymmetric, linear_of

TRANSFORMS = [
    Rotation(20, "hadamard", 8),
    Rotation(20, "hadamard", 4),
    Rotation(20, "random", 7, seed=3),
    ChannelScale(np.linspace(0.5, 2, 20).astype(np.float32)),
]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_input_is_transformed_at_each_call(transform, symmetric):
    given, weight = asymmetric()
    if symmetric:
        given |= {"codes": (given["codes"].astype(int) - 4).astype(np.int8), "zeros": None}
        weight = given["codes"] * np.repeat(given["scales"].astype(float), 8, axis=1)[:, :20]
    layer = linear_of(**given, transform=transform)
    plain = transform.unfold(weight.astype(np.float32))
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(layer(x).numpy(), x.numpy() @ plain.T, rtol=1e-4, atol=1e-4)
    assert not np.allclose(plain, weight, atol=1e-3)
    changed = given | {"codes": given["codes"] // 2, "scales": given["scales"] * 3}
    again = linear_of(**changed, transform=transform)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    assert str(transform.describe()["type"]) in repr(layer)


@pytest.mark.parametrize("dim", [96, 160, 256, 576])
def test_factors_of_a_rotation_multiply_as_its_matrix(dim):
    rotation = Rotation(dim, "hadamard", dim)
    whole = reduce(np.kron, rotation.factors(dim))
    np.testing.assert_allclose(whole, rotation.matrix(dim), atol=1e-12)
    x = torch.randn(2, 3, dim, generator=torch.Generator().manual_seed(1))
    first, second = InputTransform(rotation), InputTransform(rotation)
    expected = x.double().numpy() @ rotation.matrix(dim).T
    np.testing.assert_allclose(first(x).numpy(), expected, atol=1e-5)
    shared = {buffer.data_ptr() for buffer in first.buffers()}
    assert shared == {buffer.data_ptr() for buffer in second.buffers()}, "layers share the matrices"
    assert sum(buffer.numel() for buffer in first.buffers()) < dim**2 / 2
