"""The grid of the codes."""

from __future__ import annotations

import numpy as np
import pytest

import loopq._native as native
from loopq.errors import ConfigError
from loopq.layers.grid import halved
from loopq.layers.grids.asymmetric import Asymmetric
from loopq.layers.grids.integer import Integer
from loopq.layers.grids.table import uneven
from loopq.layers.reader import TensorReader
from loopq.quantizers.grid import GridSettings
from loopq.storage.files import RawTensor


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8; got 5"),
        ({"group_size": 0}, r"group_size must be -1 \(per channel\) or at least 1; got 0"),
        ({"group_size": "16"}, "group_size must be a whole number; got '16'"),
        ({"symmetric": 1}, "symmetric must be true or false; got 1"),
        ({"scale_dtype": "int8"}, "scale_dtype must be one of float32, float16, bfloat16"),
        ({"scale_bits": 0}, "scale_bits must be between 1 and 11, the significant bits of float16; got 0"),
        ({"scale_bits": 9, "scale_dtype": "bfloat16"}, "scale_bits must be between 1 and 8"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(ConfigError, match=match):
        GridSettings(**changes)


def test_groups():
    assert [Integer(4, g, "float16").n_groups(100) for g in (-1, 1, 32, 100, 128)] == [1, 100, 4, 1, 1]
    assert [Integer(4, g, "float16").width(100) for g in (-1, 32)] == [100, 32]


@pytest.mark.parametrize(
    ("bits", "group_size", "scale_dtype", "match"),
    [
        (5, 16, "float16", "bits must be one of"),
        (4, 0, "float16", "group_size must be positive, or -1"),
        (4, -2, "float16", "group_size must be positive, or -1"),
        (4, 16, "float8", "scale_dtype must be one of float32, float16, bfloat16"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(bits, group_size, scale_dtype, match):
    with pytest.raises(ConfigError, match=match):
        Integer(bits, group_size, scale_dtype)


def test_unsigned_codes_begin_at_zero_and_signed_ones_below():
    assert (Integer(3, 4, "float16").offset, Integer(3, 4, "float16").limits) == (4, (-4, 3))
    assert (Asymmetric(3, 4, "float16").offset, Asymmetric(3, 4, "float16").limits) == (0, (0, 7))


def test_a_description_has_the_kind_and_the_fields():
    expected = {
        "kind": "asymmetric",
        "bits": 3,
        "group_size": 4,
        "symmetric": False,
        "scale_dtype": "float16",
    }
    assert Asymmetric(3, 4, "float16").described() == expected
    assert Integer(3, 4, "float16").described() == expected | {"kind": "integer", "symmetric": True}


def test_compressed_tensors_takes_integers_by_group_or_channel():
    kind, scheme = Integer(4, 32, "float16").compressed
    assert kind == "pack-quantized"
    assert scheme == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    }  # fmt: skip
    _, channel = Asymmetric(8, -1, "float16").compressed
    assert (channel["strategy"], channel["group_size"], channel["symmetric"]) == ("channel", None, False)
    assert uneven(4, 32, "float16").compressed is None


def test_arrays_of_another_type_shape_or_range_are_refused():
    grid = Integer(3, 4, "float16")
    codes, scales = np.zeros((2, 6), np.int8), np.ones((2, 2), np.float32)
    grid.check(codes + np.int8(3), scales, None)
    grid.check(codes - np.int8(4), scales, None)
    for wrong, match in (
        ((codes + np.int8(4), scales, None), r"3-bit codes lie in -4\.\.3; got 4\.\.4"),
        ((codes - np.int8(5), scales, None), r"got -5\.\.-5"),
        ((codes.astype(np.uint8), scales, None), "codes are uint8"),
        ((codes[0], scales, None), r"shape \(6,\); expected int8 \(out, in\)"),
        ((codes[:0], scales[:0], None), r"shape \(0, 6\)"),
        ((codes, scales[:, :1], None), r"scales of shape \(2, 1\); expected \(2, 2\)"),
        ((codes, scales, scales), "INT3 codes have none"),
    ):
        with pytest.raises(ConfigError, match=match):
            grid.check(*wrong)


@pytest.mark.parametrize(
    ("bits", "scale_dtype", "size"), [(3, "float16", 2), (4, "float32", 4), (8, "bfloat16", 2)]
)
def test_bytes_are_whole_words_of_codes_and_the_scales(bits, scale_dtype, size):
    grid = Integer(bits, 16, scale_dtype)
    codes = np.random.default_rng(0).integers(*grid.limits, (5, 37), endpoint=True).astype(np.int8)
    scales = np.full((5, 3), 0.5, np.float32)
    tensors = grid.tensors(codes, scales, None)
    n_words = (37 * bits + 31) // 32
    assert tensors["weight_packed"].shape == (5, n_words)
    assert tensors["weight_shape"].array().tolist() == [5, 37]
    assert grid.n_bytes(5, 37) == 5 * n_words * 4 + 5 * 3 * size
    assert grid.n_bytes(5, 37) == sum(tensors[f"weight_{t}"].data.size for t in ("packed", "scale"))
    reader = TensorReader("f", {f"m.{name}": tensor for name, tensor in tensors.items()})
    again, read, zeros = grid.read(reader, "m", 5, 37)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(read, scales)
    assert zeros is None
    assert isinstance(tensors["weight_scale"], RawTensor)


def test_halves_of_a_block_share_bytes():
    values = np.array([[1, 2, 3, 4, 5, 6, 7, 15]], np.uint8)
    assert halved(values).tolist() == [[1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4, 4 | 15 << 4]]


def test_the_core_rounds_as_it_is_asked():
    grid = Integer(4, 8, "float32")
    weight = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)

    def error(**asked):
        solved = native.rtn(weight, grid.core(**asked))
        return np.square(grid.dequantize(solved["codes"], solved["scales"]) - weight).mean(), solved["scales"]

    plain, largest = error()
    best, _ = error(scale_search="mse")
    assert best < plain
    _, coarse = error(scale_bits=3)
    mantissa, _ = np.frexp(coarse)
    assert (mantissa * 8 == np.round(mantissa * 8)).all()
    assert (largest > 0).all()
    assert (error(signed=True)[1] < 0).any()
    half = error(scale_dtype="float16")[1]
    np.testing.assert_array_equal(half, half.astype(np.float16).astype(np.float32))
