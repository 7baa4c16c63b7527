"""Hadamard matrices, block rotations, channel scales, and the layers that carry them."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.layers.transforms import (
    ChannelScale,
    Rotation,
    RotationConfig,
    from_description,
    hadamard,
    random_orthogonal,
)
from tests.support.problems import correlated, solve


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 20, 24, 28, 32, 36, 44, 60, 64, 160, 320, 512])
def test_hadamard_rows_are_orthogonal(n):
    h = hadamard(n).astype(np.int64)
    assert set(np.unique(h)) <= {-1, 1}
    np.testing.assert_array_equal(h @ h.T, n * np.eye(n, dtype=np.int64))


def test_hadamard_of_huginns_width_exists_and_odd_sizes_do_not():
    h = hadamard(5280)
    rows = h[[0, 1, 17, 5279]].astype(np.int64)
    np.testing.assert_array_equal(
        rows @ h.T.astype(np.int64) != 0, np.eye(5280, dtype=bool)[[0, 1, 17, 5279]]
    )
    assert hadamard(6) is None
    assert hadamard(7) is None


@pytest.mark.parametrize(
    ("dim", "kind", "block"),
    [(96, "hadamard", 32), (84, "hadamard", 64), (70, "random", 32), (54, "hadamard", 54)],
)
def test_rotation_is_orthogonal_and_changes_no_product(dim, kind, block):
    rng = np.random.default_rng(0)
    rotation = Rotation(dim, kind, block, seed=3)
    weight, x = rng.normal(size=(11, dim)).astype(np.float32), rng.normal(size=(30, dim)).astype(np.float32)
    turned = rotation.fold(x)
    np.testing.assert_allclose(turned @ rotation.fold(weight).T, x @ weight.T, atol=2e-5)
    np.testing.assert_allclose(rotation.unfold(rotation.fold(weight)), weight, atol=1e-6)
    hessian = x.astype(np.float64).T @ x
    np.testing.assert_allclose(
        rotation.conjugate(hessian), turned.astype(np.float64).T @ turned, rtol=1e-4, atol=1e-3
    )
    np.testing.assert_allclose(
        np.linalg.eigvalsh(rotation.conjugate(hessian)),
        np.linalg.eigvalsh(hessian),
        atol=1e-9 * np.trace(hessian),
    )
    for size in set(rotation.sizes()):
        np.testing.assert_allclose(rotation.matrix(size) @ rotation.matrix(size).T, np.eye(size), atol=1e-12)


def test_partial_blocks_are_named():
    assert Rotation(10560, "hadamard", 512).sizes() == [512] * 20 + [320]
    assert Rotation(10560, "hadamard", 512).describe()["made"] == {"320": "hadamard", "512": "hadamard"}
    assert Rotation(70, "hadamard", 64).describe()["made"] == {"64": "hadamard", "6": "random"}


def test_spelling():
    assert RotationConfig("none").of(64, 8) is None
    assert RotationConfig("hadamard").of(64, 8) == Rotation(64, "signed", 64)
    assert RotationConfig("random:16", 5).of(64, 8) == Rotation(64, "random", 16, 5)
    for bad in ("hadamrd", "hadamard:x", "random:-1", "hadamard:0"):
        with pytest.raises(ConfigError, match="rotation"):
            RotationConfig(bad)


def test_a_rotation_spreads_an_outlier_column():
    """The setting of Li, Table 14: per channel, INT4, one input column of the weight is huge."""
    rng = np.random.default_rng(1)
    weight, hessian = rng.normal(size=(32, 64)).astype(np.float32), correlated(rng, 64)
    weight[:, 9] *= 50
    losses = {}
    for rotation in ("none", "hadamard", "hadamard:32", "random:32"):
        layer = solve("gptq", weight, hessian, bits=4, group_size=-1, rotation=rotation)
        error = layer.dequantize() - weight
        losses[rotation] = np.trace(error @ hessian @ error.T)
    assert max(losses[k] for k in losses if k != "none") < 0.5 * losses["none"]


@pytest.mark.parametrize(("kind", "most"), [("hadamard", 1.0), ("signed", 0.25), ("random", 0.25)])
def test_signs_spread_a_constant_input(kind, most):
    """Else one column has it all, and the others fall below the precision of the sums."""
    turned = Rotation(128, kind, 128).fold(np.ones((1, 128), np.float32)) ** 2
    assert (
        turned.max() / turned.sum() == pytest.approx(1) if most == 1 else turned.max() < most * turned.sum()
    )
    assert RotationConfig("hadamard").of(128, 8) == Rotation(128, "signed", 128)


def test_channel_scales_change_no_product():
    rng = np.random.default_rng(3)
    weight, x = rng.normal(size=(5, 12)).astype(np.float32), rng.normal(size=(30, 12)).astype(np.float32)
    scale = ChannelScale(np.exp2(np.arange(12) % 4 - 1).astype(np.float32))
    turned = x / scale.scale
    np.testing.assert_allclose(turned @ scale.fold(weight).T, x @ weight.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scale.unfold(scale.fold(weight)), weight)
    hessian = x.astype(np.float64).T @ x
    np.testing.assert_allclose(
        scale.conjugate(hessian), turned.astype(np.float64).T @ turned, rtol=1e-5, atol=1e-4
    )
    assert scale.fold(weight).dtype == scale.unfold(weight).dtype == np.float32


def test_a_description_gives_the_transform_back():
    rotation = Rotation(70, "random", 32, seed=9)
    assert from_description(rotation.describe(), rotation.arrays()) == rotation
    assert rotation.arrays() == {}
    scale = ChannelScale(np.float32([1, 2]))
    again = from_description(scale.describe(), scale.arrays())
    assert isinstance(again, ChannelScale)
    np.testing.assert_array_equal(again.scale, scale.scale)
    with pytest.raises(ConfigError, match="unknown type 'other'; this file needs a newer loopq"):
        from_description({"type": "other"}, {})


def test_random_rotations_differ_by_seed_and_size_alone():
    one = random_orthogonal(6, 1)
    np.testing.assert_array_equal(one, random_orthogonal(6, 1))
    assert not np.allclose(one, random_orthogonal(6, 2))
    np.testing.assert_allclose(one @ one.T, np.eye(6), atol=1e-12)
    _, r = np.linalg.qr(np.random.default_rng([1, 6]).standard_normal((6, 6)))
    # The signs are those that make R's diagonal positive.
    triangle = one.T @ np.random.default_rng([1, 6]).standard_normal((6, 6))
    assert (np.diag(triangle) > 0).all()
    np.testing.assert_allclose(np.abs(np.diag(triangle)), np.abs(np.diag(r)))


@pytest.mark.parametrize("wrong", [{"kind": "other"}, {"block": 0}, {"dim": 0}])
def test_a_rotation_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="rotation"):
        Rotation(**({"dim": 8, "kind": "random", "block": 4} | wrong))
    assert Rotation(1, "random", 1).sizes() == [1]


def test_a_rotation_is_no_wider_than_the_layer():
    assert RotationConfig("hadamard:64", 3).of(32, 8) == Rotation(32, "signed", 32, 3)
    assert RotationConfig("hadamard:16").of(32, 8) == Rotation(32, "signed", 16)
    assert RotationConfig("random:999999999").kind == "random:999999999"
    for bad in ("random:1000000000", "random:", "hadamard:08", "none:4"):
        with pytest.raises(ConfigError, match="got"):
            RotationConfig(bad)


@pytest.mark.parametrize(
    ("dim", "group_size", "block"),
    [
        (576, 64, 64),
        (1536, 128, 128),
        (1536, 256, 128),
        (576, 128, 64),
        (96, 40, 32),
        (160, -1, 32),
        (64, 8, None),
        (72, 64, None),
    ],
)
def test_the_candidate_is_no_wider_than_a_group_and_divides_the_input(dim, group_size, block):
    found = RotationConfig("auto").of(dim, group_size)
    assert found == (None if block is None else Rotation(dim, "signed", block))


def test_no_hadamard_matrix_of_these_sizes():
    assert [n for n in range(1, 33) if hadamard(n) is not None] == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]
