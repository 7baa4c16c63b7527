"""GGUF files through the package `gguf`. Its errors become loopq's and name the file."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from loopq.errors import CheckpointError, LoopqError, require
from loopq.storage.files import check_regular
from loopq.storage.schema import shown

MAGIC = b"GGUF"
#: The key "general.type" with the string "imatrix", as it stands among the first keys of a file.
_IMPORTANCE = b"general.type" + (8).to_bytes(4, "little") + (7).to_bytes(8, "little") + b"imatrix"
_HEAD = 4096
#: Bytes of a value by its type. Strings and arrays say their lengths.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _DEEPEST = 8, 9, 4


def holds_gguf(path: Path, *, importance: bool) -> bool:
    """Whether a file begins like GGUF and holds importance instead of a model. Needs no package."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head.startswith(MAGIC) and (_IMPORTANCE in head) == importance


def package() -> Any:
    """Return the package after adding Q2_0: 64 weights in 18 bytes, newer than its release 0.19."""
    gguf = require("gguf")
    kinds = gguf.GGMLQuantizationType
    if "Q2_0" not in kinds.__members__:
        member = int.__new__(kinds, 42)
        member._name_, member._value_ = "Q2_0", 42
        kinds._member_map_["Q2_0"] = kinds._value2member_map_[42] = member
        gguf.GGML_QUANT_SIZES[member] = (64, 18)
    return gguf


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Convert errors of the package into an error that names the file."""
    try:
        yield
    except (LoopqError, OSError):
        raise
    except Exception as cause:
        # The package checks little, so a damaged file can cause any error in its arithmetic.
        what = " ".join(str(cause).split())
        raise CheckpointError(
            f"{path}: a GGUF file that is damaged or not understood by the package gguf "
            f"({type(cause).__name__}: {what:.200})"
        ) from cause


class _Head:
    """Lengths in the head of a file. The package goes through as many entries as a file claims, wherever it ends."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.n_bytes = path, file, path.stat().st_size
        self.order = "<"

    def check(self) -> None:
        """Go through all keys and values.

        Raises
        ------
        CheckpointError
            The file ends before one of them does.
        """
        self.skip(len(MAGIC))
        version = self.number("I")
        if not version & 0xFFFF:
            self.order = ">"
        self.number("Q")
        for _ in range(self.number("Q")):
            self.skip(self.number("Q"))
            self.value(self.number("I"))

    def number(self, kind: str) -> int:
        """Read a whole number."""
        at = self.file.tell()
        self.skip(struct.calcsize(kind))
        self.file.seek(at)
        value: int = struct.unpack(self.order + kind, self.file.read(struct.calcsize(kind)))[0]
        return value

    def skip(self, n_bytes: int) -> None:
        """Go on by some bytes."""
        at = self.file.tell()
        if n_bytes > self.n_bytes - at:
            raise CheckpointError(
                f"{self.path}: a GGUF file that is cut off or damaged: at byte {at} it claims {n_bytes} more, and "
                f"it has {self.n_bytes - at}; copy it again"
            )
        self.file.seek(n_bytes, os.SEEK_CUR)

    def value(self, kind: int, depth: int = 0) -> None:
        """Go past a value. The package refuses types that do not exist."""
        if kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            inner, n = self.number("I"), self.number("Q")
            if depth == _DEEPEST:
                raise CheckpointError(
                    f"{self.path}: a GGUF file with arrays within more than {_DEEPEST} arrays"
                )
            if inner in _SIZES:
                self.skip(n * _SIZES[inner])
            else:
                for _ in range(n):
                    self.value(inner, depth + 1)
        else:
            self.skip(_SIZES.get(kind, 1))


def open_gguf(path: Path) -> Any:
    """Open a file with the package's reader.

    Raises
    ------
    CheckpointError
        If it is not a plain file, or damaged.
    MissingExtraError
        If the package is not installed.
    """
    check_regular(path)
    gguf = package()
    with path.open("rb") as file:
        _Head(path, file).check()
    with told(path):
        return gguf.GGUFReader(path)


def contents(path: Path, reader: Any, key: str) -> Any:
    """Return the value of a key. None if the file does not have it.

    Raises
    ------
    CheckpointError
        If it cannot be read, or is a string with terminal control characters.
    """
    field = reader.fields.get(key)
    if field is None:
        return None
    with told(path):
        value = field.contents()
    if isinstance(value, str) and not value.isprintable():
        raise CheckpointError(f"{path}: key {key} is {shown(value)}; allowed: printable characters")
    return value
