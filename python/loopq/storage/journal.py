"""Resume interrupted runs: each finished piece of a long run is one file, complete or absent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from loopq import _native
from loopq.errors import LoopqError
from loopq.storage.files import RawTensor, read_header, read_tensors, write_tensors
from loopq.storage.folders import remove_leftovers
from loopq.storage.lock import Claims
from loopq.storage.shelf import Shelf

#: Seconds between two snapshots of growing sums, or this multiple of the last snapshot's duration if that is longer.
SNAPSHOT_SECONDS, SNAPSHOT_TIMES = 60.0, 9.0
_NOTHING: Mapping[str, RawTensor] = {}


#: Python files that the user gave and that ran in this process.
_RAN: list[Path] = []


def note_run(path: Path) -> None:
    """Note that a Python file of the user ran. It can register or change anything, so it belongs to each key."""
    if path.resolve() not in _RAN:
        _RAN.append(path.resolve())


def ran() -> tuple[Path, ...]:
    """Return the Python files of `note_run`."""
    return tuple(_RAN)


def versions() -> dict[str, str]:
    """Versions of loopq and of the libraries whose arithmetic it uses; "" for an absent library."""
    return {"loopq": _native.__version__} | {
        name: version_of(name) for name in ("numpy", "torch", "transformers")
    }


@cache
def version_of(name: str) -> str:
    """Version of an installed package; "" for an absent one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def digest_of(*parts: Any) -> str:
    """SHA-256 over plain data, in hexadecimal."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(*parts: Any) -> str:
    """SHA-256 over plain data and `versions`, in hexadecimal: the identity of a piece of work."""
    return digest_of(versions(), *parts)


class Snapshots:
    """Schedule for saving growing sums: once a minute, but for at most a tenth of the time."""

    def __init__(self) -> None:
        self._since, self._wait = time.monotonic(), SNAPSHOT_SECONDS

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._since >= self._wait

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Save in this block."""
        began = time.monotonic()
        yield
        self._since = time.monotonic()
        self._wait = max(SNAPSHOT_SECONDS, SNAPSHOT_TIMES * (self._since - began))


@dataclass(frozen=True)
class Piece:
    """A finished piece of work.

    Parameters
    ----------
    tensors : mapping of str to RawTensor
        Arrays of the piece.
    facts : dict
        Plain data of the piece.
    """

    tensors: Mapping[str, RawTensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """Finished pieces of one work.

    Parameters
    ----------
    folder : Path or None
        Folder of the pieces. With None nothing is saved.
    key : str
        Identity of the work (`fingerprint` of everything that determines its result). Pieces with another key are
        ignored, so runs with other settings can share a folder.
    """

    folder: Path | None
    key: str = ""

    def save(self, name: str, tensors: Mapping[str, RawTensor] = _NOTHING, **facts: Any) -> None:
        """Write a piece and replace an older one of the same name."""
        path = self._path(name)
        if path is not None:
            _ = self._cleared
            text = json.dumps(facts, sort_keys=True)
            head = {"key": self.key, "facts": text, "sha256": _digest(tensors, text)}
            write_tensors(path, tensors, head)

    def find(self, name: str) -> Piece | None:
        """Read a piece of this work; None if it is missing or damaged."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            _, head = read_header(path)
            tensors = read_tensors(path)
        except LoopqError:
            return None
        text = head.get("facts", "")
        if head.get("key") != self.key or head.get("sha256") != _digest(tensors, text):
            return None
        return Piece(tensors, dict(json.loads(text)))

    @cached_property
    def shelf(self) -> Shelf | None:
        """Return the place for arrays of pieces on disk; None if nothing is saved."""
        if self.folder is None:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        return Shelf(self.folder)

    def has(self, name: str) -> bool:
        """Whether a piece has a file. `find` checks whether it is complete."""
        path = self._path(name)
        return path is not None and path.is_file()

    def names(self, start: str) -> list[str]:
        """Return the names of the pieces with this prefix."""
        if self.folder is None:
            return []
        return [
            unquote(p.stem)
            for p in (self.folder / self.key[:16]).glob(f"{quote(start, safe='')}*.safetensors")
        ]

    def claims(self) -> Claims:
        """Return claims on pieces of this work, for processes that divide it. The journal must have a folder.

        Raises
        ------
        LoopqError
            The folder cannot be written, or is gone.
        """
        assert self.folder is not None
        place = self.folder / self.key[:16]
        try:
            # Without parents: others ended the work of a missing folder, and it must not reappear.
            for folder in (self.folder, place):
                folder.mkdir(exist_ok=True)
        except OSError as cause:
            raise LoopqError(f"{place}: cannot be written ({cause.strerror})") from cause
        return Claims(place)

    @cached_property
    def _cleared(self) -> None:
        """Remove what killed processes left of pieces, once before the first one is saved: a folder may stay."""
        assert self.folder is not None
        remove_leftovers(self.folder / self.key[:16])

    def _path(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        # Parameter names come from models and dumps. None of their characters may lead out of the folder.
        return self.folder / self.key[:16] / f"{quote(name, safe='')}.safetensors"


def _digest(tensors: Mapping[str, RawTensor], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        total.update(tensor.data.data)
    return total.hexdigest()
