"""One writer for each output: a lock beside it, held as long as the run lasts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from loopq.errors import LoopqError

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Be the only run that writes an output, inside the block.

    Parameters
    ----------
    out : Path
        File or folder that is to be written; the lock is `.NAME.lock` beside it, and is gone afterwards. A killed run
        leaves the file, but no lock: the system ends it with the process (on Windows the file is the lock).

    Raises
    ------
    LoopqError
        Another run is writing it; the message says which.
    """
    path = out.with_name(f".{out.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _hold(path)
    except OSError as cause:
        raise LoopqError(f"{out}: cannot be written ({cause.strerror or cause})") from cause
    try:
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        os.truncate(handle, 0)
        os.write(handle, json.dumps(owner).encode())
        yield
    finally:
        # Removed while it is held, so that nobody can hold the file that is going.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


def _hold(path: Path) -> int:
    while True:
        if sys.platform == "win32":
            try:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError as cause:
                raise _taken(path) from cause
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            os.close(handle)
            raise _taken(path) from cause
        # Its last holder may have removed it between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)


def _taken(path: Path) -> LoopqError:
    try:
        owner = json.loads(path.read_text("utf-8"))
        who = f"process {int(owner['pid'])} on {str(owner['host'])[:64]}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    name = path.name.removeprefix(".").removesuffix(".lock")
    return LoopqError(
        f"{path.with_name(name)}: {who} is writing it (lock {path}); wait for it, or name another output"
    )
