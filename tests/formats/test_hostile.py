"""Checkpoints that were changed, by accident or on purpose: one line each, and nothing read or written outside."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import safetensors

from loopq.errors import CheckpointError, LoopqError, SystemContractError
from loopq.formats.convert import read_any, write_as
from loopq.formats.quantized_folder import matches
from loopq.storage.files import (
    RawTensor,
    check_new,
    inside,
    map_tensors,
    new_folder,
    own_folder,
    read_header,
    read_json,
    read_tensors,
    remove_leftovers,
    remove_own,
    replacing,
    write_tensors,
)
from loopq.storage.schema import checked, parse_json, sealed
from loopq.systems.base import SharedParameter

from ..soak.files import FINE, campaign, checkpoints
from ..support.checkpoints import checkpoint, layer, reseal


def test_campaign():
    counts = campaign([checkpoints], range(1500))
    assert counts.failures == []
    assert sum(counts.outcomes.values()) == 1500
    assert counts.outcomes["refused"] > 850
    assert set(counts.outcomes) == set(FINE)


def test_tensors_are_those_of_the_safetensors_library(tmp_path):
    rng = np.random.default_rng(0)
    made = {
        "a": RawTensor.of(rng.integers(0, 2**16, (3, 5)).astype(np.uint16), "BF16"),
        "b": RawTensor.of(rng.normal(size=(2, 0, 4))),
        "c": RawTensor.of(np.float16(rng.normal(size=7))),
        "d": RawTensor.of(np.array(3, np.int8)),
        "e": RawTensor.of(rng.integers(0, 2, 9).astype(bool)),
    }
    write_tensors(tmp_path / "x.safetensors", made, {"key": "value"})
    found = read_tensors(tmp_path / "x.safetensors")
    for name, tensor in map_tensors(tmp_path / "x.safetensors").items():
        assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape)
        np.testing.assert_array_equal(tensor.data, found[name].data)
    library = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert set(found) == set(library) == set(made)
    for name, tensor in found.items():
        assert (tensor.dtype, list(tensor.shape)) == (library[name]["dtype"], list(library[name]["shape"]))
        assert tensor.data.tobytes() == bytes(library[name]["data"]) == made[name].data.tobytes()
    assert read_header(tmp_path / "x.safetensors")[1] == {"key": "value"}


def test_mapped_tensors_are_read_only_aligned_and_outlive_the_file(tmp_path):
    """Other writers need not align what they write: such a tensor is read. A file that is replaced stays as it was."""
    path = tmp_path / "x.safetensors"
    entry = (
        '{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}'
    )
    header = f'{{"a":{entry}}}'.encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + np.float32([1.5, -2]).tobytes())
    found = map_tensors(path)
    assert found["b"].array().flags.aligned
    write_tensors(path, {"a": RawTensor.of(np.zeros(1000))})
    assert found["a"].data.tolist() == [7]
    assert found["b"].float32().tolist() == [1.5, -2]
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


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 100_000, "not valid JSON"),
        ("[" * 65 + "]" * 65, "more than 64 levels"),
        ('{"a": 1, "a": 1}', "'a' stands twice"),
        ("[NaN]", "NaN is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        ("[1e999]", "1e999 is not a finite number"),
        ("1" * 5000, "a whole number of 5000 digits"),
        (r'["\ud800"]', "surrogates not allowed"),
        (r'{"\udfff": 1}', "surrogates not allowed"),
        (b"\xff", "can't decode byte 0xff"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_json_that_is_refused(text, match):
    with pytest.raises(CheckpointError, match=f"^file: not valid JSON .*{match}|^file: {match}"):
        parse_json(text, "file")
    assert parse_json("[1e999, -Infinity]", "file", finite=False) == [float("inf"), float("-inf")]


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


def test_links_may_stay_inside_or_lead_to_the_blobs_of_the_hub_cache(tmp_path):
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


def test_shards_outside_the_folder_are_refused(tmp_path):
    write_as(tmp_path / "g", checkpoint(layer(8, 32)), "gptq")
    names = read_tensors(tmp_path / "g" / "model.safetensors")
    (tmp_path / "g" / "model.safetensors").rename(tmp_path / "x.safetensors")
    (tmp_path / "g" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "../x.safetensors")})
    )
    with pytest.raises(
        CheckpointError, match=r"weight_map\.\S+: '\.\./x\.safetensors'; allowed: a plain name"
    ):
        read_any(tmp_path / "g")


@pytest.mark.parametrize(
    ("version", "match"),
    [(2, "altered: its sha256 is not that of its content"), (1, "version 1; this loopq reads version 2")],
)
def test_an_index_without_its_sum_is_refused_whatever_version_it_claims(tmp_path, version, match):
    write_as(tmp_path / "q", checkpoint(layer(8, 32)), "native")
    index = tmp_path / "q" / "loopq.json"
    data = read_json(index)
    assert (data["version"], len(data.pop("sha256"))) == (2, 64)
    index.write_text(json.dumps(data | {"version": version}))
    with pytest.raises(CheckpointError, match=match):
        read_any(tmp_path / "q")


def test_every_change_of_one_bit_of_the_index_is_noticed(tmp_path):
    write_as(tmp_path / "q", checkpoint(layer(8, 32)), "native")
    path = tmp_path / "q" / "loopq.json"
    original = path.read_bytes()
    for place in range(len(original)):
        changed = bytearray(original)
        changed[place] ^= 1 << (place % 7)
        path.write_bytes(changed)
        try:
            same = read_json(path) == json.loads(original)
        except LoopqError:
            continue
        if not same:  # white space of another kind is the same content
            with pytest.raises(CheckpointError):
                read_any(tmp_path / "q")


def test_parts_of_a_checkpoint_that_do_not_fit_are_refused_before_writing(tmp_path):
    for change, match in [
        (
            lambda c: c.dense.update({"a.b.weight": c.dense["norm.weight"]}),
            "is stored twice, or tied and stored",
        ),
        (
            lambda c: c.dense.update({"z.weight_packed": c.dense["norm.weight"]}),
            "holds packed codes of no layer",
        ),
        (
            lambda c: c.ties.update({"lm_head.weight": "nothing.weight"}),
            "is tied to nothing.weight, which is not stored",
        ),
        (lambda c: c.settings.pop("system"), "settings: 'system' is missing"),
        (lambda c: c.side_files.update({"model.safetensors": b""}), "among the config and tokenizer files"),
    ]:
        whole = checkpoint(layer(8, 32))
        change(whole)
        with pytest.raises(CheckpointError, match=match):
            write_as(tmp_path / "q", whole, "native")
    whole = checkpoint(layer(8, 32))
    whole.side_files["loopq_export.json"] = b"{}"
    with pytest.raises(CheckpointError, match=r"brings a file loopq_export\.json, which gptq uses itself"):
        write_as(tmp_path / "q", whole, "gptq")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(", "a*" * 5, "x" * 3000, "(?P<a", "[", "a{9}" * 5, "(a|b){99}"]
)
def test_patterns_that_could_take_for_ever_are_refused(pattern):
    with pytest.raises(CheckpointError, match=r"^config: pattern "):
        matches(pattern, "a" * 60, "config")


def test_patterns_of_the_field_are_taken():
    for pattern in (r".*layers\.\d+\.mlp.*", r"model\.layers\.0\.(q|k|v)_proj$", r"^x\.0\.a$", r".*lm_head"):
        assert not matches(pattern, "nothing", "config")
    assert matches(r"x\.\d+\.(a|b)", "x.12.a", "config")


def test_leftovers_of_dead_processes_alone_are_removed(tmp_path):
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    with replacing(tmp_path / "file") as alive:
        own = f"-{os.getpid()}-"
        stale = alive.with_name(alive.name.replace(own, f"-{dead}-"))
        stale.touch()
        alive.touch()
        unmarked = tmp_path / stale.name.replace("tmp", "partial")
        unmarked.mkdir()
        (unmarked / "precious").touch()
        marked = own_folder(tmp_path / unmarked.name.replace("file", "folder"))
        (tmp_path / ".file.tmp").touch()
        remove_leftovers(tmp_path)
        left = {p.name for p in tmp_path.iterdir()}
        assert left == {alive.name, unmarked.name, ".file.tmp"}
        assert not marked.exists()


def test_a_folder_that_loopq_did_not_make_is_neither_used_nor_removed(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="was not made by loopq"):
        own_folder(work)
    remove_own(work)
    (tmp_path / "link").symlink_to(own_folder(tmp_path / "own"))
    remove_own(tmp_path / "link")
    assert (tmp_path / "own").is_dir()
    with pytest.raises(CheckpointError, match="was not made by loopq"):
        own_folder(tmp_path / "link")
    assert (work / "precious").read_text() == "x"


def test_two_writers_of_one_folder_do_not_mix(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"out: cannot be written \(Directory not empty\)"):
        with new_folder(out, 0) as first:
            (first / "a").touch()
            with new_folder(out, 0) as second:
                assert first != second
                (second / "b").touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "b"]


def test_a_link_is_refused_as_output_before_the_work(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(
        CheckpointError, match=rf"link: a symbolic link; name the folder itself: {tmp_path}/real"
    ):
        check_new(tmp_path / "link")


def test_the_message_stays_short(tmp_path):
    with pytest.raises(CheckpointError) as refused:
        checked(SharedParameter, {"name": ["x" * 10_000] * 10_000}, "file")
    assert len(str(refused.value)) < 500
    with pytest.raises(CheckpointError) as refused:
        checked(dict[str, int], {"\n" * 10_000: "\n" * 10_000}, "file")
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


def test_what_is_sealed_says_so():
    data = sealed("loopq-x", {"b": {10: 1, 9: 2}, "a": [1.5, "é"]})
    assert list(data) == ["format", "version", "b", "a", "sha256"]
    assert data == sealed("loopq-x", {"a": [1.5, "é"], "b": {"9": 2, "10": 1}})
