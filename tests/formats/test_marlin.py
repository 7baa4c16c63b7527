"""Marlin's files: tensors by their closed formulas, padding, damage."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.convert import read_any, write_as
from loopq.formats.record import RECORD
from loopq.storage.files import read_tensors
from tests.support.formats import (
    MA,
    broken,
    drop,
    put,
)

from ..support.checkpoints import checkpoint, layer


def marlin_by_formula(codes, scales):
    """Words and scales of Marlin from the closed formulas of docs/formats/packing.md, entry by entry."""
    n_out, k_in = codes.shape
    words = np.zeros((k_in // 16) * 2 * n_out, np.uint64)
    n, k = np.meshgrid(np.arange(n_out), np.arange(k_in), indexing="ij")
    word = (k >> 4) * 2 * n_out + (n >> 6) * 128 + (4 * (n & 7) + ((k & 7) >> 1)) * 4 + ((n >> 4) & 3)
    nibble = 2 * ((n >> 3) & 1) + ((k >> 3) & 1) + 4 * (k & 1)
    np.add.at(
        words,
        word.ravel(),
        ((codes.astype(int) + 8).astype(np.uint64) << (4 * nibble).astype(np.uint64)).ravel(),
    )
    rows = np.arange(n_out)
    if scales.shape[1] == 1:
        place = (rows & ~31) + 8 * ((rows & 7) >> 1) + 2 * ((rows & 31) >> 3) + (rows & 1)
    else:
        place = (rows & ~63) + 8 * (rows & 7) + ((rows & 63) >> 3)
    stored = np.zeros((scales.shape[1], n_out), np.float32)
    stored[:, place] = scales.T
    return words.astype(np.uint32).reshape(k_in // 16, 2 * n_out), stored


@pytest.mark.parametrize(
    ("k", "n", "group"), [(128, 256, 128), (256, 256, 128), (512, 768, 128), (384, 512, -1)]
)
def test_marlin_bytes_equal_the_closed_formulas(k, n, group):
    quantized = layer(n, k, 4, group)
    form = FORMATS.get("marlin")
    prepared = form.prepare(quantized, None)
    assert prepared.notes == ()
    tensors = form.tensors("m", prepared.layer)
    words, scales = marlin_by_formula(quantized.codes, quantized.scales)
    assert tensors["m.B"].array().view(np.uint32).tobytes() == words.tobytes()
    assert tensors["m.s"].array().tobytes() == scales.astype(np.float16).tobytes()
    if k == 128:
        assert quantized.scales.shape[1] == 1, "K = g: stored in the order of one scale per output"


def test_marlin_pads_and_says_what_it_costs(tmp_path):
    quantized = layer(300, 200, 4, 128)
    written = write_as(tmp_path / "m", checkpoint(quantized), "marlin")
    assert (quantized.n_bytes, written.n_bytes) == (300 * 100 + 2 * 300 * 2, 512 * 128 + 2 * 512 * 2)
    assert written.notes == {
        quantized.name: ("padded from 300x200 to 512x256 with zeros: +36384 bytes (+116.6%)",)
    }
    stored = read_tensors(tmp_path / "m" / "model.safetensors")
    assert stored["a.b.B"].shape == (16, 1024)
    assert stored["a.b.s"].shape == (2, 512)
    (tmp_path / "m" / RECORD).unlink()
    alone = read_any(tmp_path / "m").layers[quantized.name]
    assert alone.shape == (512, 256)
    np.testing.assert_array_equal(alone.dequantize()[:300, :200], quantized.dequantize())
    assert not alone.dequantize()[300:].any()
    assert not alone.dequantize()[:, 200:].any()


def test_marlin_files_with_wrong_tensors(tmp_path):
    quantized = layer(256, 256, 4, 128)
    for change, match in [
        (drop("a.b.s"), "there is no quantized layer"),
        (put("a.b.s", np.ones((3, 256), np.float16)), r"'a\.b\.s' is F16 \[3, 256\]"),
        (put("a.b.B", np.zeros((16, 100), np.int32)), r"'a\.b\.B' has shape \[16, 100\]"),
        (put("a.b.B", np.zeros((16, 512), np.int8)), r"'a\.b\.B' is I8"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            read_any(broken(tmp_path / "d", MA, change, source=quantized))
    with pytest.raises(CheckpointError, match="group_size: 64; allowed: -1, 128"):
        read_any(broken(tmp_path / "d", MA, None, lambda c: c.update(group_size=64), source=quantized))
