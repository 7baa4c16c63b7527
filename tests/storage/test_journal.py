"""Pieces of a long run: found whole by those who work at the same thing, or not at all."""

from __future__ import annotations

import os

import numpy as np
import pytest

from loopq.errors import LoopqError
from loopq.storage.files import RawTensor, read_header, read_tensors, replacing, write_tensors
from loopq.storage.journal import Journal, Snapshots, fingerprint

ARRAYS = {"a/b": RawTensor.of(np.arange(6, dtype=np.int64).reshape(2, 3)), "c": RawTensor.of(np.ones(2))}


def piece_of(journal, name):
    piece = journal.find(name)
    return piece and ({n: t.array().tolist() for n, t in piece.tensors.items()}, piece.facts)


def test_a_piece_comes_back_as_it_was_saved(tmp_path):
    journal = Journal(tmp_path / "work", "key")
    assert journal.find("first") is None
    journal.save("first", ARRAYS, n=3, rows={"x": [1, 2]})
    journal.save("empty", done=True)
    assert piece_of(Journal(tmp_path / "work", "key"), "first") == (
        {"a/b": [[0, 1, 2], [3, 4, 5]], "c": [1.0, 1.0]},
        {"n": 3, "rows": {"x": [1, 2]}},
    )
    assert piece_of(journal, "empty") == ({}, {"done": True})
    journal.save("first", {}, n=4)
    assert piece_of(journal, "first") == ({}, {"n": 4})


def test_the_next_run_removes_what_a_killed_one_left_of_a_piece(tmp_path):
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    Journal(tmp_path, "key").save("first")
    with replacing(tmp_path / "key" / "second.safetensors") as part:
        part.touch()
        stale = part.with_name(part.name.replace(f"-{os.getpid()}-", f"-{dead}-"))
        stale.touch()
    Journal(tmp_path, "key").save("second")
    assert {p.name for p in (tmp_path / "key").iterdir()} == {"first.safetensors", "second.safetensors"}


def test_without_a_folder_nothing_is_saved():
    journal = Journal(None, "key")
    journal.save("first", ARRAYS)
    assert journal.find("first") is None


def test_pieces_of_other_work_are_not_found_and_share_the_folder(tmp_path):
    keys = [fingerprint("weights", {"bits": bits}) for bits in (3, 4)]
    assert len(set(keys)) == 2
    assert fingerprint("weights", {"b": 1, "a": 2}) == fingerprint("weights", {"a": 2, "b": 1})
    journals = [Journal(tmp_path, key) for key in keys]
    journals[0].save("layer", ARRAYS, n=0)
    assert journals[1].find("layer") is None
    journals[1].save("layer", n=1)
    assert [piece_of(j, "layer")[1] for j in journals] == [{"n": 0}, {"n": 1}]
    # Two keys that begin alike share the place of a piece, and still do not take each other's.
    other = Journal(tmp_path, keys[0][:16] + "0" * 48)
    assert other.find("layer") is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "facts", "array", "renamed"])
def test_a_damaged_piece_is_not_found(tmp_path, damage):
    journal = Journal(tmp_path, "key")
    journal.save("piece", ARRAYS, n=3)
    (path,) = tmp_path.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    tensors, (_, metadata) = dict(read_tensors(path)), read_header(path)
    if damage == "cut":
        path.write_bytes(data[:-3])
    elif damage == "flipped":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "facts":
        write_tensors(path, tensors, {**metadata, "facts": '{"n": 4}'})
    elif damage == "array":
        write_tensors(path, {**tensors, "c": RawTensor.of(np.zeros(2))}, metadata)
    else:
        write_tensors(path, {"d": tensors["c"], "a/b": tensors["a/b"]}, metadata)
    assert journal.find("piece") is None
    journal.save("piece", ARRAYS, n=3)
    assert piece_of(journal, "piece")[1] == {"n": 3}


@pytest.mark.parametrize(
    "name", ["core.0/fc.weight", "../../outside", "/absolute", "..", ".", "sweep-1/a.weight", "a%2Fb", ""]
)
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    folder = tmp_path / "deep" / "work"
    journal = Journal(folder, "key")
    journal.save(name, ARRAYS, of=name)
    assert piece_of(journal, name)[1] == {"of": name}
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 1
    assert files[0].parent == folder / "key"


def test_different_names_are_different_pieces(tmp_path):
    journal = Journal(tmp_path, "key")
    names = ["a/b", "a%2Fb", "a.b", "a b", "A/B"]
    for name in names:
        journal.save(name, of=name)
    assert [piece_of(journal, name)[1]["of"] for name in names] == names


def test_snapshots_come_each_minute_and_take_a_tenth_at_most(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    snapshots, due = Snapshots(), []

    def after(seconds):
        for more in (seconds - 0.1, 0.1):
            clock[0] += more
            due.append(snapshots.due())

    after(60.0)
    for took, wait in ((1.0, 60.0), (20.0, 180.0), (1.0, 60.0)):
        with snapshots.saving():
            clock[0] += took
        after(wait)
    assert due == [False, True] * 4


def test_claims_in_a_folder_that_is_gone_are_refused(tmp_path):
    with pytest.raises(LoopqError, match="cannot be written"):
        Journal(tmp_path / "gone" / "work", "a" * 64).claims()
