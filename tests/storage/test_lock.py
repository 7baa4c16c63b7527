"""Claims: one process for each piece of shared work, and another where it is gone."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loopq.errors import CheckpointError, LoopqError
from loopq.storage import lock
from loopq.storage.files import HOST, write_text
from loopq.storage.folders import new_folder, own_folder
from loopq.storage.lock import Claims, held, kept, locked, new_or_same


def test_nested_blocks_share_a_lock_but_threads_do_not(tmp_path):
    with kept(tmp_path / "q"):
        with held(tmp_path / "q") as late:
            assert not late
        assert (tmp_path / ".q.lock").exists()
        with ThreadPoolExecutor(1) as other, pytest.raises(LoopqError, match="is writing it"):
            other.submit(locked(tmp_path / "q").__enter__).result()
    assert list(tmp_path.iterdir()) == []


def claim(folder, name, host, process):
    (folder / f"{name}.claim.0").write_text(json.dumps({"host": host, "pid": process}))


def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_one_process_alone_has_a_claim(tmp_path):
    with Claims(tmp_path) as claims:
        assert claims.take("a/b")
        assert claims.holds("a/b")
        assert not claims.take("a/b")
        owner = json.loads((tmp_path / "a%2Fb.claim.0").read_text())
        assert owner == {"host": socket.gethostname(), "pid": os.getpid()}
        claims.release("a/b")
        assert claims.take("a/b")
    assert list(tmp_path.iterdir()) == []


def test_racing_processes_claim_each_piece_once(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from loopq.storage.lock import Claims\n"
        "claims = Claims(Path(sys.argv[1])).__enter__()\n"
        "time.sleep(max(0.0, float(sys.argv[2]) - time.time()))\n"
        "print(*(n for n in range(200) if claims.take(str(n))), flush=True); sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path), str(time.time() + 1)]
    racing = [subprocess.Popen(argv, stdin=-1, stdout=-1, text=True) for _ in range(4)]
    taken = [int(n) for process in racing for n in process.stdout.readline().split()]
    for process in racing:
        process.communicate()
    assert sorted(taken) == list(range(200))


def test_the_claim_of_a_process_that_ended_is_free(tmp_path):
    claim(tmp_path, "a", socket.gethostname(), ended())
    # A container that was started again has the number that it had.
    claim(tmp_path, "b", socket.gethostname(), os.getpid())
    claim(tmp_path, "c", socket.gethostname(), os.getppid())
    with Claims(tmp_path) as claims:
        assert claims.take("a")
        assert claims.take("b")
        assert not claims.take("c")


def test_another_machines_claim_is_free_when_its_heart_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 0.05)
    (tmp_path / "halfway.claim.0").touch()
    for number, name in enumerate(("a", "halfway")):
        if number == 0:
            claim(tmp_path, name, "elsewhere", 1)
        with Claims(tmp_path) as claims:
            assert not claims.take(name)
            os.utime(tmp_path / f"{name}.claim.0", ns=(1, 1))
            time.sleep(0.1)
            assert not claims.take(name)
            time.sleep(0.1)
            assert claims.take(name)
            assert (tmp_path / f"{name}.claim.1").exists()
            assert not claims.take(name)


def test_a_heart_beats_and_who_overslept_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with Claims(tmp_path) as claims:
        assert claims.take("a")
        path = tmp_path / "a.claim.0"
        os.utime(path, ns=(1, 1))
        for _ in range(500):
            if path.stat().st_mtime_ns != 1:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime_ns != 1
        (tmp_path / "a.claim.1").touch()
        assert not claims.holds("a")
        (tmp_path / "a.claim.1").unlink()
        path.unlink()
        assert not claims.holds("a")


def test_a_folder_that_is_gone_is_an_error_of_one_line(tmp_path):
    with (
        Claims(tmp_path / "gone") as claims,
        pytest.raises(LoopqError, match=r"claim\.0: cannot be written"),
    ):
        claims.take("a")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_a_lock_that_is_no_plain_file_is_refused_untouched(tmp_path, kind):
    kept = tmp_path / "kept.txt"
    place = tmp_path / ".q.lock"
    if kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(kept)
    if kind == "link":
        kept.write_text("years of work")
    with pytest.raises(LoopqError, match=r"\.q\.lock: the lock of an output must be a plain file"):
        with lock.locked(tmp_path / "q"):
            raise AssertionError("held")
    assert kept.exists() == (kind == "link")
    assert not kept.exists() or kept.read_text() == "years of work"


@pytest.mark.skipif(sys.platform == "win32", reason="the file itself is the lock there")
@pytest.mark.parametrize(
    ("text", "linked", "why"),
    [
        ("years of work", True, "hard link"),
        ("", True, "hard link"),
        (json.dumps({"host": "a", "pid": 1}), True, "hard link"),
        ("notes of the user\n", False, "something else than a lock"),
        ("{}", False, "something else than a lock"),
        ("[" * 9000, False, "something else than a lock"),
        (json.dumps({"host": "a", "pid": 1}) + " " * 9000, False, "something else than a lock"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_and_keeps_its_bytes(tmp_path, text, linked, why):
    place = tmp_path / ".q.lock"
    place.write_text(text)
    if linked:
        os.link(place, tmp_path / "other")
    with pytest.raises(LoopqError, match=why), locked(tmp_path / "q"):
        raise AssertionError("held")
    assert place.read_text() == text
    assert os.lstat(place).st_nlink == 1 + linked


@pytest.mark.skipif(sys.platform == "win32", reason="the file itself is the lock there")
def test_a_lock_of_another_user_is_refused_and_stays(tmp_path, monkeypatch):
    (tmp_path / ".q.lock").touch()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(LoopqError, match="belongs to another user"), locked(tmp_path / "q"):
        raise AssertionError("held")
    assert (tmp_path / ".q.lock").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="flock is not used there")
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("before", [False, True])
def test_a_folder_without_locks_is_named_and_gets_no_file(tmp_path, monkeypatch, code, before):
    def flock(handle, how):
        raise OSError(code, os.strerror(code))

    if before:
        (tmp_path / ".q.lock").touch()
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with pytest.raises(LoopqError, match="the file system has no locks"), locked(tmp_path / "q"):
        raise AssertionError("held")
    assert (tmp_path / ".q.lock").exists() == before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a system without /proc")
def test_a_folder_that_takes_no_files_is_refused_at_once():
    with pytest.raises(LoopqError, match="cannot be written"), locked(Path("/proc/self/fd/1")):
        pass


def left(place):
    """Leftovers of a killed run beside its output: the lock, and a folder in removal."""
    (place / ".q.lock").write_text(json.dumps({"host": socket.gethostname(), "pid": ended()}))
    going = own_folder(place / ".q.work")
    (going / "piece").touch()
    return going.rename(place / f".q.work.{HOST}-{ended()}-0a0b0c0d.partial")


@pytest.mark.parametrize("one_file", [False, True])
def test_a_killed_runs_output_is_compared_and_its_leftovers_go(tmp_path, one_file):
    out = tmp_path / "q"

    def write(text):
        with new_or_same(out) as place:
            if one_file:
                write_text(place, text)
            else:
                with new_folder(place, 0) as folder:
                    (folder / "a").write_text(text)
        return place == out

    assert write("one")
    left(tmp_path)
    assert not write("one")
    assert [p.name for p in tmp_path.iterdir()] == ["q"]
    left(tmp_path)
    with pytest.raises(CheckpointError, match="q: holds something else than this command writes"):
        write("two")
    assert (out if one_file else out / "a").read_text() == "one"
    # A run that ended well leaves no lock: its output is not looked at again.
    with pytest.raises(CheckpointError, match=r"(choose|name) a new folder"):
        write("one")


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
def test_a_forked_child_keeps_no_lock_of_a_killed_run(tmp_path):
    program = (
        "import os, sys, time; from pathlib import Path; from loopq.storage.lock import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if not child: print(os.getpid(), flush=True); os.close(1); time.sleep(600)\n"
        "    time.sleep(600)"
    )
    words = [sys.executable, "-c", program, tmp_path / "q"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        with pytest.raises(LoopqError, match="is writing it"), locked(tmp_path / "q"):
            pass
        parent.kill()
        parent.wait()
    try:
        with locked(tmp_path / "q") as left:
            assert left
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_second_writer_is_told_who_the_first_is(tmp_path):
    out = tmp_path / "q"
    with held(out) as late:
        assert not late
        with new_folder(out, 0) as folder:
            (folder / "a").touch()
        # Also in the moments after it wrote.
        with pytest.raises(LoopqError, match=f"process {os.getpid()} on .* is writing it"), held(out):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


def test_a_lock_that_grows_meanwhile_is_not_read_whole(tmp_path):
    out = tmp_path / "q"
    with held(out):
        with (tmp_path / ".q.lock").open("r+b") as file:
            file.truncate(1 << 40)
        with pytest.raises(LoopqError, match="another process is writing it"), locked(out):
            pass
