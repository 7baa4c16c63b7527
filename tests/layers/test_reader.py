"""Checked access to the tensors of a file."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor


def reader(**arrays):
    """A reader of these arrays."""
    return TensorReader("file", {name: RawTensor.of(np.asarray(a)) for name, a in arrays.items()})


def words(codes, bits):
    """One row of codes in words of 32 bits, the first code in the lowest bits."""
    whole = sum(int(code) << bits * i for i, code in enumerate(codes))
    n_words = -(-len(codes) * bits // 32)
    return np.array([[whole >> 32 * i & 0xFFFFFFFF for i in range(n_words)]], np.uint32).view(np.int32)


def test_a_tensor_of_the_type_and_shape_is_given_and_noted():
    opened = reader(a=np.zeros((2, 3), np.float32), b=np.zeros(1, np.float32))
    assert opened.get("a", ("F16", "F32"), (2, None)).shape == (2, 3)
    assert opened.used == {"a"}


@pytest.mark.parametrize(
    ("name", "dtypes", "shape", "match"),
    [
        ("b", ("F32",), (2, 3), "'b' is missing"),
        ("a", ("F16", "BF16"), (2, 3), r"'a' is F32 \[2, 3\]; expected F16 or BF16 \[2, 3\]"),
        ("a", ("F32",), (2, 4), r"expected F32 \[2, 4\]"),
        ("a", ("F32",), (3, None), r"expected F32 \[3, 'any'\]"),
        ("a", ("F32",), (2,), r"expected F32 \[2\]"),
        ("a", ("F32",), (2, 3, None), r"expected F32 \[2, 3, 'any'\]"),
    ],
)
def test_another_tensor_is_refused(name, dtypes, shape, match):
    asked = reader(a=np.zeros((2, 3), np.float32))
    with pytest.raises(CheckpointError, match=f"^file: tensor .*{match}"):
        asked.get(name, dtypes, shape)
    assert asked.used == set()


def test_scales_are_finite_and_not_zero():
    good = np.float16([[0.5, -2.0]])
    assert reader(s=good).scales("s", (1, 2)).tolist() == [[0.5, -2.0]]
    for bad in (0.0, np.nan, np.inf, -np.inf):
        with pytest.raises(CheckpointError, match="'s' holds a scale that is zero or not finite"):
            reader(s=np.float32([[1.0, bad]])).scales("s", (1, 2))


@pytest.mark.parametrize(("bits", "count"), [(4, 8), (4, 9), (3, 10), (3, 11), (2, 5), (8, 3)])
def test_codes_are_unpacked_with_their_offset(bits, count):
    codes = np.random.default_rng(bits).integers(0, 2**bits, count)
    codes[0], codes[-1] = 2**bits - 1, 1
    unpacked = reader(w=words(codes, bits)).codes("w", bits, count, 1)
    assert unpacked.dtype == np.uint8
    assert unpacked.tolist() == [codes.tolist()]
    half = 2 ** (bits - 1)
    signed = reader(w=words(codes, bits)).codes("w", bits, count, 1, offset=half)
    assert signed.dtype == np.int8
    assert signed.tolist() == [(codes - half).tolist()]
    down = reader(w=np.ascontiguousarray(words(codes, bits).T)).codes("w", bits, count, 1, down=True)
    assert down.tolist() == [codes.tolist()]


def test_bits_after_the_last_code_are_refused_with_their_row():
    good, bad = words([1] * 7, 4), words([1] * 8, 4)
    asked = reader(w=np.concatenate([good, good, bad]))
    with pytest.raises(CheckpointError, match="'w': row 2 has bits after its last code: 7 codes of 4 bits"):
        asked.codes("w", 4, 7, 3)
    assert asked.codes("w", 4, 8, 3).shape == (3, 8)
