"""Folders that loopq makes and removes: leftovers, foreign folders, impossible outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loopq.errors import CheckpointError, LoopqError
from loopq.storage.files import check_replaceable, replacing
from loopq.storage.folders import (
    check_new,
    new_folder,
    own_folder,
    remove_leftovers,
    remove_own,
    write_output,
)


@pytest.mark.parametrize("check", [check_new, check_replaceable])
def test_a_name_too_long_for_what_stands_beside_it_is_refused(tmp_path, check):
    check(tmp_path / ("L" * 190))
    with pytest.raises(LoopqError, match="a name of 240 bytes"):
        check(tmp_path / ("L" * 240))


def test_an_output_file_replaces_only_files_of_its_kind(tmp_path, monkeypatch):
    out = tmp_path / "page"
    write_output(out, b"one of ours", b"ours")
    write_output(out, b"two of ours", b"ours")
    assert out.read_bytes() == b"two of ours"
    out.write_bytes(b"years of work")
    with pytest.raises(LoopqError, match="did not write it"):
        write_output(out, b"ours", b"ours")
    assert out.read_bytes() == b"years of work"
    monkeypatch.setattr("loopq.storage.folders.free_bytes", lambda path: 1000)
    with pytest.raises(LoopqError, match="the disk has"):
        write_output(tmp_path / "large", bytes(1001), b"ours")
    assert not (tmp_path / "large").exists()


def test_leftovers_of_a_killed_output_file_go_with_the_next(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from loopq.storage.folders import output_file\n"
        "with output_file(Path(sys.argv[1]), 0) as file: file.touch(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program, tmp_path / "g.gguf"], check=False)
    assert killed.returncode == -9
    assert [p.suffix for p in tmp_path.iterdir()] == [".tmp"]
    write_output(tmp_path / "g.gguf", b"x", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["g.gguf"]


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
