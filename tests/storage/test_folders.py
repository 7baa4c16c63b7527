"""Folders that loopq makes and removes: leftovers, foreign folders, impossible outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loopq.errors import CheckpointError, LoopqError
from loopq.storage.files import (
    replacing,
)
from loopq.storage.folders import check_new, new_folder, own_folder, remove_leftovers, remove_own


def test_leftovers_of_dead_processes_alone_are_removed(tmp_path):
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    with replacing(tmp_path / "file") as alive:
        part = f"-{os.getpid()}-"
        stale = alive.with_name(alive.name.replace(part, f"-{dead}-"))
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


def test_a_foreign_folder_is_neither_used_nor_removed(tmp_path):
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


@pytest.mark.parametrize("out", ["", ".", "..", "a/..", "/", "a\0b", "loop", "loop/under", "{cwd}"])
def test_an_impossible_output_path_is_refused_in_one_line(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    if out.startswith("loop"):
        (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LoopqError) as refused, new_folder(Path(out.format(cwd=tmp_path)), 0) as folder:
        (folder / "x").touch()
    assert "\n" not in str(refused.value)
    assert "\0" not in str(refused.value)
    assert not (tmp_path / "x").exists()
    assert tmp_path.is_dir()
