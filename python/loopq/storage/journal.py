"""The one way to go on after a kill: finished pieces of a long run, each in a file that is whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from loopq.errors import LoopqError
from loopq.storage.files import RawTensor, read_header, read_tensors, write_tensors
from loopq.storage.lock import Claims
from loopq.storage.shelf import Shelf

#: Seconds between two snapshots of sums that grow, and how many times as long as the last one took, where that is more.
SNAPSHOT_SECONDS, SNAPSHOT_TIMES = 60.0, 9.0
_NOTHING: Mapping[str, RawTensor] = {}


def fingerprint(*parts: Any) -> str:
    """SHA-256 over plain data, in hexadecimal: the identity of a piece of work."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Snapshots:
    """When sums that grow are saved again: once a minute, and never for more than a tenth of the time."""

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
        Its arrays.
    facts : dict
        Its plain data.
    """

    tensors: Mapping[str, RawTensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """Finished pieces of one piece of work.

    Parameters
    ----------
    folder : Path or None
        Where they are saved; None saves nothing.
    key : str
        Identity of the work (`fingerprint` of everything that fixes its result). Pieces of another key are not found,
        so that runs of other settings can share a folder.
    """

    folder: Path | None
    key: str = ""

    def save(self, name: str, tensors: Mapping[str, RawTensor] = _NOTHING, **facts: Any) -> None:
        """Write a piece, over an older one of the same name."""
        path = self._path(name)
        if path is not None:
            text = json.dumps(facts, sort_keys=True)
            metadata = {"key": self.key, "facts": text, "sha256": _digest(tensors, text)}
            write_tensors(path, tensors, metadata)

    def find(self, name: str) -> Piece | None:
        """Read a piece back; None where there is none of this work, or only a damaged one."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            _, metadata = read_header(path)
            tensors = read_tensors(path)
        except LoopqError:
            return None
        text = metadata.get("facts", "")
        if metadata.get("key") != self.key or metadata.get("sha256") != _digest(tensors, text):
            return None
        return Piece(tensors, dict(json.loads(text)))

    @cached_property
    def shelf(self) -> Shelf | None:
        """Where arrays of pieces wait on the disk; None where nothing is saved."""
        if self.folder is None:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        return Shelf(self.folder)

    def has(self, name: str) -> bool:
        """Whether there is a file of a piece; `find` says whether it is whole."""
        path = self._path(name)
        return path is not None and path.is_file()

    def names(self, start: str) -> list[str]:
        """Names of the pieces that begin so."""
        if self.folder is None:
            return []
        return [
            unquote(p.stem)
            for p in (self.folder / self.key[:16]).glob(f"{quote(start, safe='')}*.safetensors")
        ]

    def claims(self) -> Claims:
        """Claims on pieces of this work, for processes that divide it; there must be a folder.

        Raises
        ------
        LoopqError
            The folder cannot be written, or is gone.
        """
        assert self.folder is not None
        place = self.folder / self.key[:16]
        try:
            # Not their parents: a folder of work that is gone was ended by others, and must not come back.
            for folder in (self.folder, place):
                folder.mkdir(exist_ok=True)
        except OSError as cause:
            raise LoopqError(f"{place}: cannot be written ({cause.strerror})") from cause
        return Claims(place)

    def _path(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        # Names of parameters come from models and dumps: no character of theirs may lead out of the folder.
        return self.folder / self.key[:16] / f"{quote(name, safe='')}.safetensors"


def _digest(tensors: Mapping[str, RawTensor], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        total.update(tensor.data.data)
    return total.hexdigest()
