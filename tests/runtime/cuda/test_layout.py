"""The packed layout: formulas of kernels/README.md against the vectorised packer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq import _native
from loopq.errors import ConfigError
from loopq.runtime.cuda import layout
from tests.support.cuda import words
from tests.support.cuda.cases import TABLE


def random_codes(out_features: int, in_features: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 8, (out_features, in_features)).astype(np.int8)


def pack_by_formula(codes: np.ndarray) -> np.ndarray:
    n_all, k_all = codes.shape
    tiles = -(-k_all // 64)
    words = np.zeros((n_all // 16) * tiles * 128, np.uint32)
    for n in range(n_all):
        for k in range(tiles * 64):
            stored = int(codes[n, k]) + 8 if k < k_all else 8
            word = ((n >> 4) * tiles + (k >> 6)) * 128 + (4 * (n & 7) + ((k & 7) >> 1)) * 4 + ((k >> 4) & 3)
            nibble = 2 * ((n >> 3) & 1) + ((k >> 3) & 1) + 4 * (k & 1)
            words[word] |= np.uint32(stored << (4 * nibble))
    return words.reshape(n_all // 16, -1).view(np.int32)


@pytest.mark.parametrize(
    ("out_features", "in_features"), [(16, 32), (16, 64), (48, 96), (32, 160), (64, 128)]
)
def test_packer_follows_the_formula(out_features: int, in_features: int) -> None:
    codes = random_codes(out_features, in_features)
    np.testing.assert_array_equal(layout.pack_w4(codes), pack_by_formula(codes))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_unpack_undoes_pack(strips: int, steps: int, seed: int) -> None:
    codes = random_codes(strips * 16, steps * 32, seed)
    np.testing.assert_array_equal(words.unpack_w4(layout.pack_w4(codes), steps * 32), codes)


def test_bytes_of_a_table_are_levels_plus_128() -> None:
    assert layout.level_bytes(TABLE).tobytes() == bytes(level + 128 for level in TABLE)
    assert not layout.level_bytes(None).any()


def test_padding_is_the_code_of_zero() -> None:
    packed = layout.pack_w4(np.full((16, 32), -8, np.int8)).view(np.uint32).reshape(32, 4)
    assert (packed[:, :2] == 0).all()
    assert (packed[:, 2:] == 0x88888888).all()


@pytest.mark.parametrize("shape", [(8, 64), (24, 64), (16, 48), (0, 32)])
def test_other_widths_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"multiple of 16.*multiple of 32"):
        layout.packed_shape(*shape)


def test_codes_outside_int4_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"-8\.\.7; got 0\.\.8"):
        layout.pack_w4(np.tile(np.arange(0, 9, 8, dtype=np.int8), (16, 16)))


def test_unpack_refuses_another_width() -> None:
    with pytest.raises(ConfigError, match="does not hold 128 inputs"):
        words.unpack_w4(layout.pack_w4(random_codes(16, 64)), 128)
    with pytest.raises(ConfigError, match="codes beyond 96 inputs"):
        words.unpack_w4(layout.pack_w4(random_codes(16, 128)), 96)


# ---- the packer of the core, against the twin and against the formula -----------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_core_packs_like_the_twin(strips: int, steps: int, threads: int, seed: int) -> None:
    codes = random_codes(strips * 16, steps * 32, seed)
    packed = _native.w4_pack(codes, threads)
    np.testing.assert_array_equal(packed, layout.pack_w4(codes))
    np.testing.assert_array_equal(_native.w4_unpack(packed, steps * 32, threads), codes)
    np.testing.assert_array_equal(_native.w4_pack((codes + 8).astype(np.uint8)), packed)


@pytest.mark.parametrize("in_features", [5280, 10560, 17920])
def test_the_core_packs_huginns_widths(in_features: int) -> None:
    codes = random_codes(48, in_features, in_features)
    np.testing.assert_array_equal(_native.w4_pack(codes), layout.pack_w4(codes))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((24, 64), np.int8), r"outputs \(N\) = 24 is not allowed; allowed: a multiple of 16"),
        (np.zeros((0, 64), np.int8), r"outputs \(N\) = 0"),
        (np.zeros((16, 48), np.int8), r"inputs \(K\) = 48 is not allowed; allowed: a multiple of 32"),
        (np.full((32, 32), 8, np.int8), "code 8 at row 0, column 0 does not fit 4 bits"),
        (np.eye(32, dtype=np.uint8) * 16, "code 16 at row 0, column 0 does not fit 4 bits"),
    ],
)
def test_the_core_refuses_to_pack(codes: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _native.w4_pack(codes)


def test_the_core_names_the_code_that_does_not_fit() -> None:
    codes = np.zeros((48, 96), np.uint8)
    codes[37, 65] = 255
    with pytest.raises(ConfigError, match="code 255 at row 37, column 65"):
        _native.w4_pack(codes)


def test_the_core_refuses_what_is_cut_short() -> None:
    packed = _native.w4_pack(random_codes(32, 96))
    for cut in (packed[:, :-1].copy(), packed[:, :128].copy()):
        with pytest.raises(ConfigError, match="packed codes: expected 2 x 256, got 2 x"):
            _native.w4_unpack(cut, 96)
    with pytest.raises(ConfigError, match=r"96 is not allowed.*the weight holds codes beyond it"):
        _native.w4_unpack(_native.w4_pack(random_codes(32, 128)), 96)


def test_codes_of_another_type_are_refused():
    for codes in (np.zeros((16, 32), np.uint8), np.zeros(32, np.int8)):
        with pytest.raises(ConfigError, match=r"codes are .* of shape .*; expected int8 \(out, in\)"):
            layout.pack_w4(codes)
