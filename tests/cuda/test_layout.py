"""The packed layout: formulas of kernels/README.md against the vectorised packer, and from Marlin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq import _native
from loopq.cuda import layout
from loopq.errors import ConfigError
from tests.support.cuda import marlin
from tests.support.cuda.cases import TABLE
from tests.support.cuda.marlin import marlin_by_formula


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
    np.testing.assert_array_equal(marlin.unpack_w4(layout.pack_w4(codes), steps * 32), codes)


def test_bytes_of_a_table_are_levels_plus_128() -> None:
    assert layout.level_bytes(TABLE).tobytes() == bytes(level + 128 for level in TABLE)
    assert not layout.level_bytes(None).any()


def test_padding_is_the_code_of_zero() -> None:
    packed = layout.pack_w4(np.full((16, 32), -8, np.int8)).view(np.uint32).reshape(32, 4)
    assert (packed[:, :2] == 0).all()
    assert (packed[:, 2:] == 0x88888888).all()


@pytest.mark.parametrize(
    ("k", "n", "pad_k", "pad_n"), [(128, 256, 0, 0), (96, 64, 32, 0), (160, 80, 96, 176), (64, 16, 64, 240)]
)
def test_marlin_words_are_a_permutation(k: int, n: int, pad_k: int, pad_n: int) -> None:
    codes = random_codes(n, k)
    padded = np.pad(codes, ((0, pad_n), (0, pad_k)))
    np.testing.assert_array_equal(marlin.from_marlin(marlin_by_formula(padded), k, n), layout.pack_w4(codes))


def test_marlin_scales_come_back_in_order() -> None:
    rng = np.random.default_rng(3)
    plain = rng.standard_normal((5, 128)).astype(np.float32)
    n = np.arange(128)
    stored = np.empty_like(plain)
    stored[:, (n & ~63) + 8 * (n & 7) + ((n & 63) >> 3)] = plain
    np.testing.assert_array_equal(layout.marlin_scales_to_rows(stored, 128, 544, 112), plain[:, :112])
    one = plain[:1]
    stored = np.empty_like(one)
    stored[:, (n & ~31) + 8 * ((n & 7) >> 1) + 2 * ((n & 31) >> 3) + (n & 1)] = one
    np.testing.assert_array_equal(layout.marlin_scales_to_rows(stored, -1, 544, 128), one)


@pytest.mark.parametrize("shape", [(8, 64), (24, 64), (16, 48), (0, 32)])
def test_other_widths_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"multiple of 16.*multiple of 32"):
        layout.packed_shape(*shape)


def test_codes_outside_int4_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"-8\.\.7; got 0\.\.8"):
        layout.pack_w4(np.tile(np.arange(0, 9, 8, dtype=np.int8), (16, 16)))


def test_unpack_refuses_another_width() -> None:
    with pytest.raises(ConfigError, match="does not hold 128 inputs"):
        marlin.unpack_w4(layout.pack_w4(random_codes(16, 64)), 128)
    with pytest.raises(ConfigError, match="codes beyond 96 inputs"):
        marlin.unpack_w4(layout.pack_w4(random_codes(16, 128)), 96)


def test_marlin_refuses_what_does_not_fit() -> None:
    words = marlin_by_formula(random_codes(64, 64))
    with pytest.raises(ConfigError, match="at most 64 inputs and 64 outputs"):
        marlin.from_marlin(words, 128, 64)
    for k, n in ((32, 64), (64, 48)):
        with pytest.raises(ConfigError, match=f"codes beyond {k} inputs and {n} outputs"):
            marlin.from_marlin(words, k, n)
    with pytest.raises(ConfigError, match="do not cover 2 groups"):
        layout.marlin_scales_to_rows(np.ones((1, 64), np.float32), 128, 256, 64)


# ---- the packer of the core, against the twin and against the formula -----------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_core_packs_like_the_twin(strips: int, steps: int, threads: int, seed: int) -> None:
    codes = random_codes(strips * 16, steps * 32, seed)
    packed = _native.w4_pack(codes, threads)
    np.testing.assert_array_equal(packed, layout.pack_w4(codes))
    np.testing.assert_array_equal(_native.w4_unpack(packed, steps * 32, threads), codes)
    np.testing.assert_array_equal(_native.w4_pack((codes + 8).astype(np.uint8)), packed)


@pytest.mark.parametrize(("out_features", "in_features"), [(16, 32), (16, 64), (48, 96), (64, 128)])
def test_the_core_follows_the_formula(out_features: int, in_features: int) -> None:
    codes = random_codes(out_features, in_features)
    np.testing.assert_array_equal(_native.w4_pack(codes), pack_by_formula(codes))


@pytest.mark.parametrize("in_features", [5280, 10560, 17920])
def test_the_core_packs_huginns_widths(in_features: int) -> None:
    codes = random_codes(48, in_features, in_features)
    np.testing.assert_array_equal(_native.w4_pack(codes), layout.pack_w4(codes))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_the_core_moves_marlins_words_like_the_twin(
    strips: int, steps: int, pad_k: int, pad_n: int, seed: int
) -> None:
    n, k = strips * 16, steps * 32
    file_n = -(-(n + 16 * pad_n) // 64) * 64
    codes = random_codes(n, k, seed)
    words = marlin_by_formula(np.pad(codes, ((0, file_n - n), (0, 16 * pad_k))))
    packed = _native.w4_from_marlin(words, k, n)
    np.testing.assert_array_equal(packed, marlin.from_marlin(words, k, n))
    np.testing.assert_array_equal(packed, layout.pack_w4(codes))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_code_in_the_padding_is_noticed(data: st.DataObject) -> None:
    """Whichever word of the file's padding it is in, core and twin both refuse."""
    n, k, file_n, file_k = 80, 96, 192, 144
    words = marlin_by_formula(np.pad(random_codes(n, k), ((0, file_n - n), (0, file_k - k)))).copy()
    row, column = data.draw(st.integers(0, file_k - 1)), data.draw(st.integers(0, file_n - 1))
    word = 4 * (4 * (column & 7) + ((row & 7) >> 1)) + ((column >> 4) & 3)
    words[row >> 4, (column >> 6) * 128 + word] ^= 1 << (4 * data.draw(st.integers(0, 7)))
    # The word is of 16 inputs x 16 outputs, like the widths.
    if row < k and column < n:
        assert _native.w4_from_marlin(words, k, n).shape == (5, 256)
        return
    with pytest.raises(ConfigError, match="zero beyond 96 inputs and 80 outputs"):
        _native.w4_from_marlin(words, k, n)
    with pytest.raises(ConfigError, match="codes beyond 96 inputs and 80 outputs"):
        marlin.from_marlin(words, k, n)


def test_a_marlin_export_becomes_the_same_weight() -> None:
    """The file that loopq itself writes: its packer and this one agree on what a code is."""
    codes = random_codes(128, 256)
    words, _ = _native.marlin_pack(codes, np.ones((128, 2), np.float32))
    np.testing.assert_array_equal(_native.w4_from_marlin(words, 256, 128), _native.w4_pack(codes))


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
    words = marlin_by_formula(random_codes(128, 96))
    for cut in (words[:5], words[:, :128]):
        with pytest.raises(ConfigError, match="at least 96 inputs and 128 outputs"):
            _native.w4_from_marlin(cut.copy(), 96, 128)
    with pytest.raises(ConfigError, match="whole tiles of 16 inputs and 64 outputs"):
        _native.w4_from_marlin(words[:, :-2].copy(), 96, 112)
    with pytest.raises(ConfigError, match="Marlin words"):
        _native.w4_from_marlin(words[:, :129].copy(), 96, 64)
