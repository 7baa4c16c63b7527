"""Tensors in files: headers, links, leftovers, writers beside each other."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors

from loopq.errors import CheckpointError, LoopqError, SystemContractError
from loopq.formats.convert import read_any, write_as
from loopq.layers.shared import SharedParameter
from loopq.storage import files
from loopq.storage.files import (
    RawTensor,
    check_regular,
    check_size,
    float_to_raw,
    free_bytes,
    inside,
    json_bytes,
    map_tensors,
    nearest,
    read_bytes,
    read_header,
    read_json,
    read_tensor,
    read_tensors,
    replacing,
    sha256,
    write_json,
    write_tensors,
    write_text,
)

from ..support.checkpoints import checkpoint, layer, reseal


def test_tensors_are_those_of_the_safetensors_library(tmp_path):
    rng = np.random.default_rng(0)
    written = {
        "a": RawTensor.of(rng.integers(0, 2**16, (3, 5)).astype(np.uint16), "BF16"),
        "b": RawTensor.of(rng.normal(size=(2, 0, 4))),
        "c": RawTensor.of(np.float16(rng.normal(size=7))),
        "d": RawTensor.of(np.array(3, np.int8)),
        "e": RawTensor.of(rng.integers(0, 2, 9).astype(bool)),
    }
    write_tensors(tmp_path / "x.safetensors", written, {"key": "value"})
    tensors = read_tensors(tmp_path / "x.safetensors")
    for name, tensor in map_tensors(tmp_path / "x.safetensors").items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        np.testing.assert_array_equal(tensor.data, tensors[name].data)
    library = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert set(tensors) == set(library) == set(written)
    for name, tensor in tensors.items():
        assert (tensor.dtype, list(tensor.shape)) == (library[name]["dtype"], list(library[name]["shape"]))
        assert tensor.data.tobytes() == bytes(library[name]["data"]) == written[name].data.tobytes()
    assert read_header(tmp_path / "x.safetensors")[1] == {"key": "value"}


def test_mapped_tensors_are_aligned_read_only_and_outlive_files(tmp_path):
    """Other writers need not align what they write: such a tensor is read. A file that is replaced stays as it was."""
    path = tmp_path / "x.safetensors"
    entry = (
        '{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}'
    )
    header = f'{{"a":{entry}}}'.encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + np.float32([1.5, -2]).tobytes())
    tensors = map_tensors(path)
    assert tensors["b"].array().flags.aligned
    write_tensors(path, {"a": RawTensor.of(np.zeros(1000))})
    assert tensors["a"].data.tolist() == [7]
    assert tensors["b"].float32().tolist() == [1.5, -2]
    big = map_tensors(path)["a"]
    with pytest.raises(ValueError, match="read-only"):
        big.data[0] = 1
    path.unlink()
    assert not big.array().any()


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "body", "match"),
    [
        (f'{{"a":{ENTRY},"a":{ENTRY}}}', 8, "'a' stands twice in an object"),
        (f'{{"a":{ENTRY},"b":{ENTRY}}}', 8, "damaged, truncated or not a safetensors file"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', 12, "damaged"),
        (f'{{"a":{ENTRY}}}', 9, "damaged"),
        (f'{{"a":{ENTRY}}}', 7, "damaged"),
        ('{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', 8, "damaged"),
        ('{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}', 8, "damaged"),
        (f'{{"a":{ENTRY},"__metadata__":[]}}', 8, "damaged"),
        ("[]", 8, "damaged"),
        (
            '{"a":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]}}',
            8,
            "tensor 'a' is F8_E8M0; known: F64",
        ),
        ("", 0, "damaged"),
    ],
)
def test_a_header_that_the_format_forbids(tmp_path, header, body, match):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(body))
    with pytest.raises(CheckpointError, match=match) as refused:
        read_tensors(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "folder", "device"):
        for read in (read_json, read_tensors):
            with pytest.raises(CheckpointError, match=f"{name}: not a plain file"):
                read(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"loop: cannot be read \(Too many levels of symbolic links\)"):
        read_json(tmp_path / "loop")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(CheckpointError, match="large: 68719476736 bytes; allowed: 268435456"):
        read_json(tmp_path / "large")


def test_links_may_stay_inside_or_lead_to_hub_blobs(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for place in (snapshot, blobs, tmp_path):
        (place / "file").write_text("{}")
    for name, target, fine in (
        ("in", "file", True),
        ("blob", "../../blobs/file", True),
        ("out", "../../file", False),
    ):
        (snapshot / name).symlink_to(target)
        if fine:
            assert read_json(inside(snapshot, name)) == {}
        else:
            with pytest.raises(CheckpointError, match="out: a link that leads out of the folder"):
                inside(snapshot, name)


@pytest.mark.parametrize(
    "name", ["../evil.sh", "/abs", "a/b", "..", ".hidden", "", "a\\b", "C:x", "a\nb", "a\0b", "x" * 201]
)
def test_no_name_of_a_file_leads_out(tmp_path, name):
    whole = checkpoint(layer(8, 32))
    whole.side_files[name] = b"#!/bin/sh"
    with pytest.raises(CheckpointError, match="allowed: a plain name, no path"):
        write_as(tmp_path / "q", whole, "native")
    del whole.side_files[name]
    write_as(tmp_path / "p" / "q", whole, "native")
    index = tmp_path / "p" / "q" / "loopq.json"
    reseal(index, lambda d: d["files"].append(d["files"][0] | {"file": name}))
    with pytest.raises(CheckpointError, match=r"loopq\.json: files\[5\]\.file: .*; allowed: a plain name"):
        read_any(index.parent)
    with pytest.raises(SystemContractError, match=r"parameter: .*; allowed: a plain name"):
        SharedParameter(name, ("x",), 8, 8, "out_in", 1, "mlp")
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def _stand(place, kind, other):
    """Put something else than a plain file in a place. Never in /dev: a fault would break the machine."""
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place))
    elif kind == "device":
        if os.geteuid():
            pytest.skip("only root makes devices")
        os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to({"link": other, "dangling": "nowhere", "descriptor": "/proc/self/fd/1"}[kind])


_WRITERS = {
    "text": lambda path: write_text(path, "new"),
    "json": lambda path: write_json(path, {}),
    "tensors": lambda path: write_tensors(path, {}),
}


@pytest.mark.skipif(sys.platform == "win32", reason="pipes and links need rights there")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "link", "dangling", "descriptor"])
@pytest.mark.parametrize("writer", _WRITERS)
def test_no_output_replaces_what_is_no_plain_file(tmp_path, monkeypatch, writer, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("years of work")
    _stand(Path("out"), kind, "kept")
    before = os.lstat("out")
    with pytest.raises(LoopqError, match=r"out: is a .*; name a file"):
        _WRITERS[writer](tmp_path / "out")
    assert os.lstat("out").st_mode == before.st_mode
    assert os.lstat("out").st_ino == before.st_ino
    assert (tmp_path / "kept").read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "out"]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes need rights there")
def test_a_pipe_that_comes_during_the_writing_stays(tmp_path):
    with pytest.raises(LoopqError, match="is a pipe"), replacing(tmp_path / "out") as temporary:
        temporary.touch()
        os.mkfifo(tmp_path / "out")
    assert stat.S_ISFIFO((tmp_path / "out").lstat().st_mode)


def test_a_file_with_a_second_name_keeps_its_bytes_there(tmp_path):
    (tmp_path / "kept").write_text("years of work")
    os.link(tmp_path / "kept", tmp_path / "out")
    write_text(tmp_path / "out", "new")
    assert (tmp_path / "kept").read_text() == "years of work"
    assert (tmp_path / "out").read_text() == "new"


@pytest.mark.parametrize("name", ["", ".", "a\0b"])
def test_a_file_without_a_name_is_refused(name):
    with pytest.raises(LoopqError):
        write_text(name, "text")


def test_floats_are_rounded_half_to_even():
    import torch

    values = np.float32([1.0, 1.00390625, 1.01171875, -3.14159, 65504.0, 1e-30, 0.0])
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)):
        raw = float_to_raw(values, dtype)
        assert (raw.dtype, raw.shape) == (dtype, (7,))
        np.testing.assert_array_equal(raw.float32(), torch.from_numpy(values).to(kind).float().numpy())
    with pytest.raises(CheckpointError, match="expected a floating tensor, got I32"):
        RawTensor.of(np.zeros(2, np.int32)).float32()
    assert RawTensor.of(np.float64([0.1])).float32().tolist() == [np.float32(0.1)]


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert (check_regular(path), read_bytes(path, 5)) == (5, b"12345")
    with pytest.raises(LoopqError, match="a: 5 bytes; allowed: 4"):
        read_bytes(path, 4, LoopqError)
    with pytest.raises(CheckpointError, match="none: missing"):
        check_regular(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"a/b: cannot be read \(Not a directory\)"):
        check_regular(path / "b")
    with pytest.raises(CheckpointError, match="not a plain file"):
        check_regular(tmp_path)


def test_a_file_shorter_than_its_header_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": RawTensor.of(np.arange(6, dtype=np.int32))})
    stored = read_header(path)[0]["a"]
    assert (stored.dtype, stored.shape, stored.n_bytes) == ("I32", (6,), 24)
    assert stored.offset == path.stat().st_size - 24
    assert files.read_tensor(path, stored).array().tolist() == list(range(6))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="shorter than its header says"):
        files.read_tensor(path, stored)
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.read_tensor(tmp_path / "none", stored)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "a"
    with replacing(path) as temporary:
        temporary.write_text("1")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert path.read_text() == "1"
    with pytest.raises(ValueError, match="x"), replacing(path) as temporary:
        temporary.write_text("2")
        raise ValueError("x")
    assert path.read_text() == "1"
    assert list(path.parent.iterdir()) == [path]
    with (
        pytest.raises(LoopqError, match=r"a: cannot be written \(No space left on device\)"),
        replacing(path),
    ):
        raise OSError(28, "No space left on device")
    (tmp_path / "file").write_text("")
    with pytest.raises(LoopqError, match="cannot be written"):
        write_text(tmp_path / "file" / "b", "x")


def test_the_nearest_folder_that_there_is(tmp_path):
    assert nearest(tmp_path / "a" / "b") == tmp_path
    assert nearest(tmp_path) == tmp_path
    (tmp_path / "self").symlink_to(tmp_path / "self")
    assert nearest(tmp_path / "self" / "x") == tmp_path
    assert free_bytes(tmp_path / "a") > 0


def test_json_has_one_form_and_no_numbers_beside_the_standard(tmp_path):
    assert json_bytes({"b": [1], "a": "é"}) == b'{\n "a": "\\u00e9",\n "b": [\n  1\n ]\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        json_bytes(float("nan"))
    (tmp_path / "a.json").write_text('{"a": NaN}')
    with pytest.raises(LoopqError):
        read_json(tmp_path / "a.json")
    assert np.isnan(read_json(tmp_path / "a.json", finite=False)["a"])
    assert write_text(str(tmp_path / "t"), "é").read_bytes() == b"\xc3\xa9"
    # SHA-256 of these two bytes.
    import hashlib

    assert sha256(tmp_path / "t") == hashlib.sha256(b"\xc3\xa9").hexdigest()


def test_reading_names_what_is_wrong(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": RawTensor.of(np.ones(4, np.float32))})
    ((_, stored),) = read_header(path)[0].items()
    with pytest.raises(CheckpointError, match="16 bytes; allowed: 3"):
        (tmp_path / "b").write_bytes(b"x" * 16)
        check_size(tmp_path / "b", 3)

    def fails(error):
        def call(*_, **__):
            raise error

        return call

    monkeypatch.setattr(np, "fromfile", fails(MemoryError()))
    with pytest.raises(CheckpointError, match="a tensor of 0 MiB does not fit in memory"):
        read_tensor(path, stored)
    monkeypatch.setattr(np, "memmap", fails(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="cannot be read"):
        map_tensors(path)
    monkeypatch.setattr(Path, "open", fails(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(path)
