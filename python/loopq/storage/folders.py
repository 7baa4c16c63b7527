"""Folders that are complete or absent: outputs, and intermediate work that may be removed."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from loopq.errors import CheckpointError, LoopqError
from loopq.storage.files import (
    HOST,
    beside,
    check_named,
    check_replaceable,
    free_bytes,
    nearest,
    replacing,
    sha256,
    writer,
)

_MARKER = ".made-by-loopq"
#: File in a work folder with the digest of each input of the last run in it.
INPUTS = "inputs.json"


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove partial files and folders of this name that killed processes of this machine left in a folder."""
    for path in folder.glob(f".{glob.escape(name) if name != '*' else name}.*{HOST}-*"):
        writer = re.fullmatch(rf".*\.{HOST}-([0-9]{{1,9}})-[0-9a-f]{{8}}\.(tmp|partial)", path.name)
        if writer is None or runs(int(writer[1])):
            continue
        if writer[2] == "tmp":
            path.unlink(missing_ok=True)
        _clear(path)


def runs(process: int) -> bool:
    """Whether a process of this machine runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def own_folder(folder: Path, error: type[LoopqError] = CheckpointError) -> Path:
    """Make a folder for intermediate work, marked as removable. A marked folder is reused.

    Raises
    ------
    LoopqError
        Error of the given class: the place holds something that loopq did not make.
    """
    marker = folder / _MARKER
    # The order matters: another process may be making the same folder, the marker first.
    if folder.is_symlink() or (any(folder.glob("*")) and not marker.is_file()):
        raise error(f"{folder}: stands where intermediate work goes and was not made by loopq; move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as cause:
        raise error(f"{folder}: cannot be written ({cause.strerror})") from cause
    return folder


def is_own(folder: Path) -> bool:
    """Whether `own_folder` made a folder."""
    return (folder / _MARKER).is_file() and not folder.is_symlink()


def remove_own(folder: Path, *, if_empty: bool = False) -> None:
    """Remove a folder of `own_folder` with its contents. Other folders stay unchanged.

    With `if_empty`, remove it only if it holds no file of work.
    """
    if if_empty and any(p.is_file() and p.name not in (_MARKER, INPUTS) for p in folder.rglob("*")):
        return
    if is_own(folder):
        # First a name that shows its owner: a kill may interrupt the removal at any moment.
        going = folder.with_name(f"{folder.name}.{writer()}.partial")
        with contextlib.suppress(OSError):
            folder.rename(going)
            _clear(going)


def _clear(folder: Path) -> None:
    """Remove an empty folder, or a marked one with the marker last."""
    with contextlib.suppress(OSError):
        if is_own(folder):
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != _MARKER:
                    path.unlink()
            (folder / _MARKER).unlink()
        folder.rmdir()


def check_new(out: Path, error: type[LoopqError] = CheckpointError) -> None:
    """Refuse an impossible output folder before anything is computed for it. An empty folder may exist.

    Raises
    ------
    LoopqError
        Error of the given class: the folder is not empty, a file or a link is in its place or a file above it, or the
        place cannot be written.
    """
    check_named(out, error)
    if out.is_symlink():
        raise error(f"{out}: a symbolic link; name the folder itself: {os.path.realpath(out)}")
    if out.is_dir():
        with contextlib.suppress(OSError):
            # A folder is renamed to its name, so the calling shell would be in a deleted folder.
            if out.samefile(os.curdir):
                raise error(f"{out}: the folder that the command runs in; name a new one in it")
        if any(out.iterdir()):
            # An earlier run may have been killed between the rename and the removal of the enclosing folder.
            remove_leftovers(out.parent, out.name)
            raise error(f"{out}: exists and is not empty; choose a new folder")
    elif out.exists():
        raise error(f"{out}: a file stands there; name a new folder")
    for place in (nearest(out.parent), nearest(out)):
        if not place.is_dir():
            raise error(f"{out}: {place} is a file, so that no folder can be made in it")
        if not os.access(place, os.W_OK | os.X_OK):
            raise error(
                f"{out}: {place} cannot be written to (read-only, or another owner's); name another folder"
            )


def check_folder(folder: Path, error: type[LoopqError] = CheckpointError) -> None:
    """Refuse an input that is not a folder."""
    if not folder.is_dir():
        raise error(f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}")


@contextlib.contextmanager
def new_folder(out: Path, n_bytes: int, error: type[LoopqError] = CheckpointError) -> Iterator[Path]:
    """Give a temporary folder beside `out` for about `n_bytes`, renamed to `out` if the block succeeds.

    Raises
    ------
    LoopqError
        Error of the given class: `out` cannot be made (`check_new`), or the disk is too small.
    """
    check_new(out, error)
    check_room(out, n_bytes, error)
    remove_leftovers(out.parent, out.name)
    # The renamed folder lies inside a marked folder, so after a kill at any moment the rest is known as loopq's.
    outer = own_folder(beside(out, "partial"), error)
    try:
        inner = outer / out.name
        inner.mkdir()
        yield inner
        inner.rename(out)
    except OSError as cause:
        raise error(f"{out}: cannot be written ({cause.strerror or cause})") from cause
    finally:
        remove_own(outer)


def check_room(out: Path, n_bytes: int, error: type[LoopqError] = CheckpointError) -> None:
    """Refuse an output of about `n_bytes` on a disk with less free space."""
    free = free_bytes(out)
    if n_bytes > free:
        raise error(
            f"{out}: takes {n_bytes / 2**20:.1f} MiB, the disk has {free / 2**20:.1f}; free some space and give the "
            "same command again"
        )


@contextlib.contextmanager
def output_file(out: Path, n_bytes: int, ours: bytes = b"") -> Iterator[Path]:
    """Give a temporary path for an output of about `n_bytes`, renamed to `out` if the block succeeds.

    Leftovers of killed runs are removed. An existing file is replaced only if it holds `ours`.

    Raises
    ------
    LoopqError
        Another file or something else stands there, the disk is too small, or the file cannot be written.
    """
    check_replaceable(out, ours=ours)
    check_room(out, n_bytes)
    remove_leftovers(out.parent, out.name)
    with replacing(out) as temporary:
        yield temporary


def write_output(out: str | Path, data: bytes, ours: bytes) -> Path:
    """Write a complete output of bytes, as in `output_file`. Return its path."""
    out = Path(out)
    with output_file(out, len(data), ours) as temporary:
        temporary.write_bytes(data)
    return out


@contextlib.contextmanager
def second(out: Path, error: type[LoopqError] = CheckpointError) -> Iterator[Path]:
    """Give a path for a second copy of an output. The copy is compared byte for byte and removed.

    Raises
    ------
    LoopqError
        Error of the given class: the two differ.
    """
    remove_leftovers(out.parent, out.name)
    outer = own_folder(beside(out, "partial"), error)
    try:
        yield outer / out.name
        if _digests(outer / out.name) != _digests(out):
            raise error(f"{out}: holds something else than this command writes; choose a new folder")
    finally:
        remove_own(outer)


def _digests(out: Path) -> dict[str, str]:
    paths = [out] if out.is_file() else [p for p in out.rglob("*") if p.is_file()]
    return {str(p.relative_to(out)): sha256(p) for p in paths}
