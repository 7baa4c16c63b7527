"""Floats of 4 bits: scales of 8 bits are torch's, the power suits the weight, and files say so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq._native as native
from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grids.fp4 import E2M1, MXFP4, NVFP4
from loopq.layers.layer import QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.quantizers.grid import GridSettings
from loopq.storage.files import RawTensor


def rounded(levels, group_size, weight):
    """A layer rounded to nearest, scales from the largest magnitude."""
    grid = GridSettings(4, group_size, levels=levels).make().fitted(weight, None, 1)
    solved = native.rtn(weight, grid.core())
    return QuantizedLayer("a.weight", grid, solved["codes"], solved["scales"], None)


@pytest.mark.parametrize("size", [1e-6, 0.01, 0.2, 30.0])
def test_scales_of_nvfp4_are_those_of_torch(size):
    rng = np.random.default_rng(0)
    weight = (size * rng.normal(size=(64, 160)) * np.exp2(rng.integers(-6, 1, (64, 1)))).astype(np.float32)
    layer = rounded("nvfp4", 16, weight)
    unit = 2.0**layer.grid.exponent
    largest = np.abs(weight).reshape(64, -1, 16).max(-1)
    wanted = torch.from_numpy(largest / 6 / unit).to(torch.float8_e4m3fn).double().numpy() * unit
    np.testing.assert_array_equal(layer.scales, wanted.astype(np.float32))
    assert layer.grid.exponent == -11 if 0.01 <= size <= 0.2 else layer.grid.exponent != -11


def test_scales_of_mxfp4_are_the_nearest_powers_of_two():
    weight = np.float32([[6, 0] * 16, [8.9, 0] * 16, [9.1, 0] * 16, [0, 0] * 16])
    assert rounded("mxfp4", 32, weight).scales.ravel().tolist() == [1, 1, 2, 1]


@pytest.mark.parametrize(("levels", "group_size"), [("nvfp4", 16), ("mxfp4", 32)])
def test_halves_of_bytes_are_sign_and_place(levels, group_size):
    weight = np.zeros((1, 32), np.float32)
    weight[0, : len(E2M1)] = np.array(E2M1) / 16
    weight[0, 16:] = weight[0, :16]
    tensors = rounded(levels, group_size, weight).tensors()
    halves = [15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7, 0]
    packed = [low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    assert tensors["a.weight_packed"].data.tolist() == packed * 2


def test_a_divisor_or_a_scale_that_is_none_is_refused():
    layer = rounded("nvfp4", 16, np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32))
    tensors = layer.tensors()
    wrong = {
        "a.weight_global_scale": RawTensor.of(np.float32([3])),
        "a.weight_scale": RawTensor.of(np.zeros((2, 2), np.uint8), "F8_E4M3"),
    }
    for name, tensor in wrong.items():
        with pytest.raises(CheckpointError, match="not positive numbers times"):
            layer.grid.read(TensorReader("f", tensors | {name: tensor}), "a", 2, 32)
    with pytest.raises(CheckpointError, match="no power of two"):
        NVFP4.from_compressed(TensorReader("f", tensors | wrong), "a")
    power = MXFP4(4, 32, "float8_e8m0fnu")
    with pytest.raises(CheckpointError, match="no power of two"):
        power.scales_to_raw(np.float32([[3]]))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"group_size": 32}, "groups of 16; got 4 bits and groups of 32"),
        ({"bits": 3}, "got 3 bits"),
        ({"scale_dtype": "bfloat16"}, "leave --set scale_dtype=... out"),
        ({"symmetric": False}, "leave --set symmetric=false out"),
        ({"scale_bits": 12}, "scale_bits must be"),
        ({"levels": "nvfp5"}, "nvfp4"),
    ],
)
def test_settings_that_it_has_not_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        GridSettings(**{"bits": 4, "group_size": 16, "levels": "nvfp4"} | changes)


def test_bytes_are_those_of_codes_scales_and_the_divisor():
    # A row of 33 has 17 bytes of codes; groups of 16 and of 32 have three and two scales.
    weight = np.random.default_rng(0).normal(size=(3, 33)).astype(np.float32)
    for levels, size, n_bytes in (("nvfp4", 16, 3 * (17 + 3) + 4), ("mxfp4", 32, 3 * (17 + 2))):
        layer = rounded(levels, size, weight)
        tensors = layer.tensors()
        assert layer.grid.n_bytes(3, 33) == n_bytes
        assert sum(t.data.nbytes for name, t in tensors.items() if not name.endswith("shape")) == n_bytes
        assert tensors["a.weight_shape"].array().tolist() == [3, 33]
        arrays = layer.grid.read(TensorReader("f", tensors), "a", 3, 33)
        np.testing.assert_array_equal(arrays[0], layer.codes)
        np.testing.assert_array_equal(arrays[1], layer.scales)
        assert arrays[2] is None


def test_the_power_suits_the_largest_weight():
    grid = GridSettings(4, 16, levels="nvfp4").make()
    # 6 and 448 are the largest level and scale.
    largest = 6.0 * 448.0
    for power, kept in ((-20, -20), (-19, -11), (-11, -11), (-10, -10), (3, 3)):
        assert grid.fitted(np.float32([[largest * 2.0**power, 0]]), None, 1).exponent == kept
    assert grid.fitted(np.float32([[-(largest * 2.0**-10) * 1.001]]), None, 1).exponent == -9
    assert grid.fitted(np.zeros((1, 16), np.float32), None, 1).exponent == -11
    assert grid.fitted(np.float32([[1e-38]]), None, 1).exponent == -100


@pytest.mark.parametrize("power", [-30, 0, 7])
def test_settings_are_read_from_the_files_of_others(power):
    tensors = {
        "a.weight_packed": RawTensor.of(np.zeros((3, 8), np.uint8)),
        "a.weight_global_scale": RawTensor.of(np.float32([2.0**-power])),
    }
    settings = NVFP4.from_compressed(TensorReader("f", tensors), "a")
    assert settings == {
        "name": "a.weight", "kind": "nvfp4", "bits": 4, "group_size": 16, "symmetric": True,
        "scale_dtype": "float8_e4m3fn", "shape": [3, 16], "exponent": power,
    }  # fmt: skip
    settings = MXFP4.from_compressed(TensorReader("f", tensors), "a")
    assert (settings["kind"], settings["group_size"], settings["scale_dtype"]) == (
        "mxfp4",
        32,
        "float8_e8m0fnu",
    )
    assert "exponent" not in settings


def test_schemes_of_compressed_tensors():
    layer = rounded("nvfp4", 16, np.ones((1, 16), np.float32))
    name, scheme = layer.grid.compressed
    assert (name, layer.grid.label) == ("nvfp4-pack-quantized", "NVFP4")
    assert scheme == {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
        "dynamic": False, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    name, scheme = MXFP4(4, 32, "float8_e8m0fnu").compressed
    assert (name, scheme["strategy"], scheme["scale_dtype"]) == (
        "mxfp4-pack-quantized",
        "group",
        "torch.uint8",
    )


def test_scales_of_mxfp4_are_exponents_plus_127():
    grid = MXFP4(4, 32, "float8_e8m0fnu")
    scales = np.float32([[2.0**-126, 0.5, 1.0, 2.0**127]])
    raw = grid.scales_to_raw(scales)
    assert raw.array().tolist() == [[1, 126, 127, 254]]
    reader = TensorReader("f", {"a.weight_scale": raw})
    np.testing.assert_array_equal(grid.scales_of(reader, "a", (1, 4)), scales)
    bad = {"a.weight_scale": RawTensor.of(np.uint8([[255]]))}
    with pytest.raises(CheckpointError, match="holds a scale that is no number"):
        grid.scales_of(TensorReader("f", bad), "a", (1, 1))
    with pytest.raises(CheckpointError, match="no number of float8_e4m3fn"):
        rounded("nvfp4", 16, np.ones((1, 16), np.float32)).grid.scales_to_raw(np.float32([[3.14159]]))
