"""Locks and claims: a lock gives each output one writer, a claim gives each piece of shared work one process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from loopq.errors import CheckpointError, LoopqError
from loopq.storage.files import check_named, read_bytes
from loopq.storage.folders import check_new, is_own, runs, second

if sys.platform != "win32":
    import fcntl

#: Maximum bytes of a lock: host and process of its holder.
MAX_LOCK = 4096
#: Locks that `kept` holds, by thread, and whether a killed run had left them.
_MINE: dict[tuple[Path, int], bool] = {}


#: Open locks of this process.
_OPEN: set[int] = set()


def _close_copies() -> None:
    """Close the locks in a forked child. They would outlive the process that holds them."""
    for handle in _OPEN:
        os.close(handle)
    _OPEN.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_copies)


def work_folder(out: str | Path) -> Path:
    """Return the folder for the progress of a run with this output."""
    return Path(out).parent / f".{Path(out).name}.work"


def _lock(out: Path) -> Path:
    return out.parent / f".{out.name}.lock"


def is_written(out: Path) -> bool:
    """Whether an output exists. A folder or file gets its name when it is complete."""
    return not out.is_symlink() and (out.is_file() or (out.is_dir() and any(out.iterdir())))


def check_out(out: Path, error: type[LoopqError] = CheckpointError) -> None:
    """Refuse an output that is neither new nor from a run that was killed late or continues.

    Raises
    ------
    LoopqError
        Error of the given class, as in `check_new`.
    """
    check_named(out, error)
    begun = os.path.lexists(_lock(out)) or is_own(work_folder(out))
    if not (begun and is_written(out)):
        check_new(out, error)


@contextlib.contextmanager
def held(out: Path, error: type[LoopqError] = CheckpointError) -> Iterator[bool]:
    """Be the only run that writes a new output, inside the block. Give whether a killed run had already written it.

    Raises
    ------
    LoopqError
        Another run is writing it, or as in `check_out`.
    """
    check_out(out, error)
    with locked(out) as left:
        late = (left or is_own(work_folder(out))) and is_written(out)
        if not late:
            # Another run may have written it meanwhile.
            check_new(out, error)
        yield late


@contextlib.contextmanager
def kept(out: Path) -> Iterator[None]:
    """Hold the lock of an output that more than one block of this thread writes. These blocks share it.

    Raises
    ------
    LoopqError
        As in `locked`.
    """
    key = _key(_lock(out))
    with locked(out) as left:
        _MINE[key] = left
        try:
            yield
        finally:
            del _MINE[key]


def _key(path: Path) -> tuple[Path, int]:
    return path.absolute(), threading.get_ident()


@contextlib.contextmanager
def new_or_same(out: Path, error: type[LoopqError] = CheckpointError) -> Iterator[Path]:
    """Hold an output as `held` does, and give the path to write. An existing output is compared with a second copy."""
    with held(out, error) as late:
        if not late:
            yield out
            return
        with second(out, error) as again:
            yield again


@contextlib.contextmanager
def locked(out: Path) -> Iterator[bool]:
    """Be the only run that writes an output, inside the block. Give whether a killed run had begun to write it.

    Parameters
    ----------
    out : Path
        File or folder to write. The lock is `.NAME.lock` beside it and is removed afterwards. A killed run leaves the
        file, but no lock: the system ends it with the process (on Windows the file is the lock).

    Raises
    ------
    LoopqError
        Another run is writing it. The message names it.
    """
    path = _lock(out)
    if _key(path) in _MINE:
        yield _MINE[_key(path)]
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, left = _hold(path)
    except OSError as cause:
        raise LoopqError(f"{out}: cannot be written ({cause.strerror or cause})") from cause
    _OPEN.add(handle)
    try:
        os.truncate(handle, 0)
        os.write(handle, _own())
        yield left
    finally:
        # A forked child that leaves the block holds nothing.
        if handle in _OPEN:
            # Removed while it is held, so no other process can hold the vanishing file.
            with contextlib.suppress(OSError):
                path.unlink()
            _OPEN.discard(handle)
            os.close(handle)


def _hold(path: Path) -> tuple[int, bool]:
    """Open and lock the file. Also return whether it existed."""
    while True:
        if sys.platform == "win32":
            try:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), False
            except FileExistsError as cause:
                raise _taken(path) from cause
        # Never through a link, because that would empty its target.
        plain, left = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, False
        try:
            try:
                handle = os.open(path, plain | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                try:
                    handle, left = os.open(path, plain), True
                except FileNotFoundError:
                    # Its holder has just removed it.
                    continue
        except OSError as cause:
            if path.is_symlink():
                raise _no_file(path) from cause
            raise
        try:
            _flock(path, handle, left)
            # After the lock, so that no holder is just writing its name.
            _check_lock(path, handle)
        except LoopqError:
            os.close(handle)
            raise
        # Its last holder may have removed it between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle, left
        os.close(handle)


def _check_lock(path: Path, handle: int) -> None:
    """Refuse an open file that no run of this user left as a lock. Its bytes would be lost."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise _no_file(path)
    text = os.pread(handle, MAX_LOCK + 1, 0)
    if status.st_nlink > 1:
        why = "has a second name (a hard link)"
    elif sys.platform != "win32" and status.st_uid != os.geteuid():
        why = "belongs to another user"
    elif text and (len(text) > MAX_LOCK or not _owner(text)[0]):
        why = "holds something else than a lock of loopq"
    else:
        return
    raise LoopqError(f"{path}: stands where the lock of an output goes and {why}; move it away")


def _flock(path: Path, handle: int, left: bool) -> None:
    """Lock an open file. A folder that knows no locks keeps no new file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        raise _taken(path) from cause
    except OSError as cause:
        if not left:
            with contextlib.suppress(OSError):
                path.unlink()
        raise LoopqError(
            f"{path.parent}: the file system has no locks (flock: {cause.strerror or cause}), which keep two runs "
            "from writing one output; name an output on another disk"
        ) from cause


def _no_file(path: Path) -> LoopqError:
    return LoopqError(
        f"{path}: the lock of an output must be a plain file, and this is a link or a device: remove it"
    )


def _taken(path: Path) -> LoopqError:
    host, process = "", 0
    with contextlib.suppress(LoopqError):
        host, process = _owner(read_bytes(path, MAX_LOCK, LoopqError))
    who = f"process {process} on {host}" if host else "another process"
    name = path.name.removeprefix(".").removesuffix(".lock")
    return LoopqError(
        f"{path.with_name(name)}: {who} is writing it (lock {path}); wait for it, or name another output"
    )


def _own() -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()


def _owner(text: bytes) -> tuple[str, int]:
    """Return host and process of a lock or claim. The host is empty if the owner was killed before it wrote them."""
    try:
        owner = json.loads(text)
        return str(owner["host"])[:64], int(owner["pid"])
    except (ValueError, KeyError, TypeError):
        return "", 0


#: Seconds between two heartbeats of a claim, and seconds without one until another process takes it over. Network file
#: systems may show a file's time a minute late.
BEAT, STALE = 10.0, 120.0


class Claims:
    """Pieces of work that any number of processes share, on any machines with a common folder.

    A claim is a file `NAME.claim.N` that only one process can make (O_EXCL). It names its owner, who renews its time
    every `BEAT` seconds. A claim is stale if its time stops for `STALE` seconds, by the clock of the observing process.
    It is also stale if its owner has ended on this machine. Then a single process makes the next number. An owner that
    stalled for so long does not notice, so claimed work must tolerate being done twice.

    Parameters
    ----------
    folder : Path
        Folder of the claims. It exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}
        self._seen: dict[Path, tuple[int, float]] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Claims:
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for name in list(self._held):
            self.release(name)

    def take(self, name: str) -> bool:
        """Claim a piece of work. Return False if another process has it.

        Raises
        ------
        LoopqError
            The folder cannot be written, or is gone.
        """
        number = 0
        while self._path(name, number).exists():
            number += 1
        if number and not self._left(name, number - 1):
            return False
        path = self._path(name, number)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        except OSError as cause:
            raise LoopqError(f"{path}: cannot be written ({cause.strerror})") from cause
        with os.fdopen(handle, "wb") as file:
            file.write(_own())
        self._held[name] = number
        return True

    def holds(self, name: str) -> bool:
        """Whether a claim of this process is valid: it was not taken over, and the work has not ended."""
        number = self._held[name]
        return self._path(name, number).exists() and not self._path(name, number + 1).exists()

    def release(self, name: str, *, done: bool = False) -> None:
        """Return a piece of work.

        The claim on finished work stays, without a heartbeat, because others may notice the end late.
        """
        path = self._path(name, self._held.pop(name))
        if not done:
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, name: str, number: int) -> Path:
        return self._folder / f"{quote(name, safe='')}.claim.{number}"

    def _left(self, name: str, number: int) -> bool:
        """Whether the owner of a claim is gone."""
        path = self._path(name, number)
        try:
            # Opened, because a network file system may answer a plain query from its cache.
            with path.open("rb") as file:
                beat, (host, process) = os.fstat(file.fileno()).st_mtime_ns, _owner(file.read())
        except OSError:
            return False
        mine = process == os.getpid()
        if host == socket.gethostname() and (not runs(process) or (mine and self._held.get(name) != number)):
            return True
        last, since = self._seen.get(path, (0, 0.0))
        if beat != last:
            self._seen[path] = (beat, time.monotonic())
            return False
        return time.monotonic() - since > STALE

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            for name, number in list(self._held.items()):
                with contextlib.suppress(OSError):
                    os.utime(self._path(name, number))
