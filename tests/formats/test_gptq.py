"""GPTQ's files: tensors by definition, both versions, one group size."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.formats import FORMATS
from loopq.formats.convert import read_any, write_as
from loopq.formats.record import RECORD
from tests.support.formats import (
    RAGGED,
    as_words,
)

from ..support.checkpoints import checkpoint, layer


def bitstream(codes, bits):
    """Words of one run of codes, by the definition: code j in bits j*b to (j+1)*b of one long number."""
    number = sum(int(c) << (bits * j) for j, c in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [(number >> (32 * i)) & 0xFFFFFFFF for i in range(count)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_tensors_by_definition(bits, symmetric):
    made = layer(40, 45, bits, 16, symmetric)
    form = FORMATS.get("gptq_v2")
    tensors = form.tensors("m", form.prepare(made, "keep").layer)
    middle = 1 << (bits - 1)
    u = made.codes.astype(int) + (middle if symmetric else 0)
    z = np.full(made.scales.shape, middle) if symmetric else made.zeros.astype(int)
    for column in (0, 7, 39):
        assert as_words(tensors["m.qweight"])[:, column].tolist() == bitstream(u[column], bits)
    for group in range(3):
        assert as_words(tensors["m.qzeros"])[group].tolist() == bitstream(z[:, group], bits)
        np.testing.assert_array_equal(tensors["m.scales"].array()[group], made.scales[:, group])
    assert tensors["m.g_idx"].array().tolist() == [j // 16 for j in range(45)]
    assert [t.dtype for t in tensors.values()] == ["I32", "I32", "F16", "I32"]


def test_gptq_version_1_stores_zero_minus_one_field_by_field():
    for bits in (2, 3, 4, 8):
        made = layer(32, 32, bits, 32)
        first = FORMATS.get("gptq").tensors("m", made)["m.qzeros"]
        assert as_words(first)[0].tolist() == bitstream([(1 << (bits - 1)) - 1] * 32, bits)
    assert set(as_words(FORMATS.get("gptq").tensors("m", layer(32, 32))["m.qzeros"]).flat) == {0x77777777}
    assert set(as_words(FORMATS.get("gptq_v2").tensors("m", layer(32, 32))["m.qzeros"]).flat) == {0x88888888}


def test_gptq_gives_all_layers_one_group_size(tmp_path):
    made = [layer(32, 64, 4, 32, name="a.weight"), RAGGED, layer(32, 72, 4, 32, name="c.weight"),
            layer(32, 64, 4, 16, name="d.weight")]  # fmt: skip
    written = write_as(tmp_path / "g", checkpoint(*made), "gptq", ragged="split")
    assert written.notes == {
        "a.weight": ("groups of 32 cut to 8: +384 bytes",),
        RAGGED.name: ("groups of 32 cut to 16: +256 bytes", "groups of 16 cut to 8: +640 bytes"),
        "c.weight": ("groups of 32 cut to 8: +384 bytes",),
    }
    (tmp_path / "g" / RECORD).unlink()
    again = read_any(tmp_path / "g").layers
    assert [again[one.name].grid.group_size for one in made] == [8, 8, 8, 16]
    for one in made:
        np.testing.assert_array_equal(again[one.name].dequantize(), one.dequantize())
