"""Files of llama.cpp: content, damage, odd names and the missing package."""

from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats.convert import write_as
from loopq.formats.gguf.file import _Head
from tests.golden import files as golden


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of a small model of Nanbeige's shape, and one of importance, both of llama.cpp."""
    gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
    base = tmp_path_factory.mktemp("files")
    write_as(base / "m.gguf", golden.checkpoint(group_size=32), "gguf")
    writer = gguf.GGUFWriter(base / "i.gguf", "nanbeige")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["some text"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 16)
    writer.add_tensor("output.weight.in_sum2", np.ones((1, 32), np.float32))
    writer.add_tensor("output.weight.counts", np.full((1, 1), 48, np.float32))
    for write in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{write}")()
    writer.close()
    return base


def test_inspect_says_what_a_file_of_llama_cpp_holds(files, command):
    code, text, _ = command("inspect", files / "m.gguf")
    assert code == 0
    assert "format gguf, architecture nanbeige, 1 layers, 3 loops; tokenizer none" in text
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines()[2:4]}
    assert rows == {"F32": "5", "Q4_0": "7"}
    data = json.loads(command("inspect", files / "m.gguf", "--json")[1])
    assert data["format"] == "gguf"
    (q,) = (t for t in data["tensors"] if t["name"] == "blk.0.ffn_up.weight")
    assert (q["type"], q["shape"], q["n_bytes"]) == ("Q4_0", [192, 128], 192 * 4 * 18)
    code, text, _ = command("inspect", files / "i.gguf")
    assert code == 0
    assert "importance of 1 layers; 3 chunks of 16 tokens of ['some text']" in text
    data = json.loads(command("inspect", files / "i.gguf", "--json")[1])
    assert data["layers"] == [{"name": "output.weight", "n_columns": 32, "n_rows": 48.0}]


def test_a_damaged_file_of_llama_cpp_is_one_line(files, tmp_path, command):
    data = (files / "m.gguf").read_bytes()
    random = np.random.default_rng(0)
    broken = tmp_path / "broken.gguf"
    damages = [data[:n] for n in (4, 9, 24, 40, 300, 900, len(data) - 5000)]
    for _ in range(20):
        changed = bytearray(data)
        for place in random.integers(4, 1200, 8):
            changed[place] = random.integers(256)
        damages.append(bytes(changed))
    refused = 0
    for damage in damages:
        broken.write_bytes(damage)
        code, out, err = command("inspect", broken)
        if code:
            refused += 1
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert str(broken) in err
    assert refused > 10


@pytest.mark.parametrize("n", [2**63, 2**64 - 1, 10**6])
@pytest.mark.parametrize(
    "before", [b"imatrix.datasets" + bytes([9, 0, 0, 0, 8, 0, 0, 0]), b"general.type" + bytes([8, 0, 0, 0])]
)
def test_a_length_that_the_file_does_not_have_is_refused_at_once(files, tmp_path, command, before, n):
    data = (files / "i.gguf").read_bytes()
    at = data.index(before) + len(before)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[:at] + n.to_bytes(8, "little") + data[at + 8 :])
    code, _, err = command("inspect", broken)
    assert (code, err.count("\n")) == (1, 1)
    assert "cut off or damaged" in err


def test_numbers_in_nested_and_untyped_arrays_are_bounded(tmp_path):
    def head(*values):
        path = tmp_path / "h.gguf"
        path.write_bytes(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + b"".join(values)
        )
        with path.open("rb") as file:
            _Head(path, file).check()

    array = [struct.pack("<I", 9), *[struct.pack("<IQ", 9, 1)] * 2, struct.pack("<IQ", 4, 1), bytes(4)]
    head(*array)
    for wrong in (
        array[:-1],
        [struct.pack("<I", 9), *[struct.pack("<IQ", 9, 1)] * 5],
        [struct.pack("<IIQ", 9, 99, 2**60)],
    ):
        with pytest.raises(CheckpointError, match=r"h\.gguf: a GGUF file"):
            head(*wrong)


def test_a_name_that_would_do_something_to_a_terminal_is_refused(tmp_path, command):
    gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "a\x1b[2J")
    for write in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{write}")()
    writer.close()
    code, out, err = command("inspect", tmp_path / "m.gguf")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "general.architecture" in err
    assert "\x1b" not in err


def test_a_package_that_is_missing_is_one_line(files, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, out, err = command("inspect", files / "m.gguf")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "loopq[gguf]" in err
