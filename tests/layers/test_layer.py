"""A quantized layer and its tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.layers.layer import Dequantized, LayerSettings, QuantizedLayer, TensorReader
from loopq.layers.transforms import ChannelScale, Rotation
from loopq.storage.files import RawTensor
from loopq.storage.schema import checked
from tests.support.checkpoints import dequantized, layer
from tests.support.problems import correlated, solve

PLAIN = layer(6, 40, group_size=16)
SCALE = ChannelScale(np.exp2(np.arange(40) % 5 - 2).astype(np.float32))


def read(quantized, tensors=None, **changes):
    """The layer again, from its description with changes and its tensors."""
    settings = checked(LayerSettings, quantized.settings() | changes, "file")
    return QuantizedLayer.from_tensors(
        settings, TensorReader("file", tensors or quantized.tensors()), {"n": 2}
    )


def test_layers_keep_their_transform_on_disk():
    rng = np.random.default_rng(2)
    weight, hessian = rng.normal(size=(8, 48)).astype(np.float32), correlated(rng, 48)
    turned = solve("gptq", weight, hessian, bits=3, group_size=16, rotation="random:32", rotation_seed=4)
    scale = ChannelScale(rng.uniform(0.5, 2, 48).astype(np.float16).astype(np.float32))
    plain = solve("rtn", scale.fold(weight), None, bits=3, group_size=16, symmetric=False)
    scaled = plain.with_transform(scale)
    for quantized in (turned, scaled):
        again = read(quantized)
        assert again.same_as(quantized)
        np.testing.assert_array_equal(again.dequantize(), quantized.dequantize())
        assert not again.same_as(solve("rtn", weight, None, bits=3, group_size=16))


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_is_read_as_it_was_described(symmetric):
    quantized = dataclasses.replace(layer(6, 40, group_size=16, symmetric=symmetric), orientation="in_out")
    again = read(quantized)
    assert again.same_as(quantized)
    assert (again.name, again.grid, again.orientation) == (quantized.name, quantized.grid, "in_out")
    assert again.report == {"n": 2}
    assert quantized.settings()["shape"] == [6, 40] == list(quantized.shape)
    np.testing.assert_allclose(again.dequantize(), dequantized(quantized), rtol=1e-6)


def test_tensors_are_named_by_the_module_and_counted():
    plain, scaled = PLAIN.tensors(), PLAIN.with_transform(SCALE).tensors()
    assert PLAIN.module == "a.b"
    assert set(plain) == {"a.b.weight_packed", "a.b.weight_scale", "a.b.weight_shape"}
    assert set(scaled) - set(plain) == {"a.b.input_scale"}
    for quantized, tensors in ((PLAIN, plain), (PLAIN.with_transform(SCALE), scaled)):
        assert quantized.n_bytes == sum(t.data.size for n, t in tensors.items() if n != "a.b.weight_shape")


@pytest.mark.parametrize(
    ("orientation", "shape"),
    [
        ("out_in", (6, 40)),
        ("table", (6, 40)),
        ("in_out", (40, 6)),
        ("conv", (6, 40, 1)),
        ("conv5", (6, 8, 5)),
        ("conv2x4", (6, 5, 2, 4)),
    ],
)
def test_the_model_stores_it_in_its_own_order(orientation, shape):
    quantized = dataclasses.replace(PLAIN, orientation=orientation)
    weight = quantized.in_model_orientation()
    assert quantized.model_shape == weight.shape == shape
    assert weight.flags.c_contiguous
    values = quantized.dequantize()
    np.testing.assert_array_equal(weight.T if orientation == "in_out" else weight.reshape(6, 40), values)
    many = Dequantized({"a": quantized, "b": PLAIN})
    assert (list(many), len(many)) == (["a", "b"], 2)
    np.testing.assert_array_equal(many["a"], weight)


def test_a_transform_is_undone_for_the_plain_input():
    scaled = PLAIN.with_transform(SCALE)
    np.testing.assert_array_equal(scaled.stored_values(), PLAIN.dequantize())
    x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    by_column = SCALE.arrays()["input_scale"]
    output = (x / by_column) @ scaled.stored_values().T
    np.testing.assert_allclose(output, x @ scaled.dequantize().T, rtol=1e-4, atol=1e-4)


def changed(quantized, what, by=1):
    """The layer with another first entry of one of its arrays."""
    array = getattr(quantized, what).copy()
    array.flat[0] += by
    return dataclasses.replace(quantized, **{what: array})


def test_same_is_by_codes_scales_zeros_grid_and_transform():
    asymmetric = layer(6, 40, group_size=16, symmetric=False)
    assert PLAIN.same_as(PLAIN.with_report(seconds=3))
    assert asymmetric.same_as(layer(6, 40, group_size=16, symmetric=False))
    assert not PLAIN.same_as(changed(PLAIN, "codes"))
    assert not PLAIN.same_as(changed(PLAIN, "scales", 0.5))
    assert not asymmetric.same_as(changed(asymmetric, "zeros"))
    assert not asymmetric.same_as(dataclasses.replace(asymmetric, zeros=None))
    assert not dataclasses.replace(asymmetric, zeros=None).same_as(asymmetric)
    scaled = PLAIN.with_transform(SCALE)
    assert scaled.same_as(PLAIN.with_transform(ChannelScale(SCALE.arrays()["input_scale"].copy())))
    for other in (PLAIN, PLAIN.with_transform(ChannelScale(2 * SCALE.arrays()["input_scale"]))):
        assert not scaled.same_as(other)
        assert not other.same_as(scaled)


def test_reports_grow_and_grids_change():
    assert PLAIN.with_report(seconds=3).report == {"n": 1, "seconds": 3}
    assert PLAIN.report == {"n": 1}
    finer = PLAIN.on_grid(group_size=8)
    assert (finer.grid.group_size, finer.grid.bits) == (8, PLAIN.grid.bits)


def test_a_file_that_disagrees_with_its_index_is_refused():
    with pytest.raises(
        CheckpointError, match=r"^file: tensor 'a.b.weight_shape' says \[6, 40\], expected \[6, 41\]"
    ):
        read(PLAIN, shape=[6, 41])
    tensors = PLAIN.tensors()
    tensors["a.b.weight_shape"] = RawTensor.of(np.array([6, 40, 1]))
    with pytest.raises(CheckpointError, match="weight_shape"):
        read(PLAIN, tensors)
    with pytest.raises(CheckpointError, match=r"^file: layer a\.b\.weight: .*levels"):
        read(PLAIN, symmetric=False, levels=[-1, 1])
    for what in ({"bits": 7}, {"group_size": 0}, {"group_size": 1 << 31}):
        with pytest.raises(CheckpointError, match=f"^file: {next(iter(what))}: .*; allowed: "):
            read(PLAIN, **what)


def test_a_transform_that_is_not_of_this_layer_is_refused():
    rotation = Rotation(40, "hadamard", 8, 0)
    turned = PLAIN.with_transform(rotation)
    assert read(turned).same_as(turned)
    description = rotation.describe()
    for change in ({"dim": 48}, {"block": 48}, {"kind": "other"}, {"made": {}}):
        with pytest.raises(CheckpointError, match=r"file: layer a\.b\.weight: transform"):
            read(turned, transform=description | change)
    with pytest.raises(CheckpointError, match="input_scale"):
        read(PLAIN, transform={"type": "channel_scale"})
