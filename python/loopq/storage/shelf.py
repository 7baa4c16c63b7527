"""Arrays that wait on disk. They are mapped, so the system can reclaim their memory."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import LoopqError

#: Bytes of one mapping. Each mapping holds a file open.
CHUNK = 1 << 30
_ALIGNMENT = 64


class Shelf:
    """A file without a name that holds arrays. It vanishes with the last of them.

    Parameters
    ----------
    folder : Path
        Folder of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._at, self._room = 0, np.zeros(0, np.uint8)

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        """Write an array and return it, read-only, from the file.

        Raises
        ------
        LoopqError
            The disk is full.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        whole = -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
        try:
            self._write(data, whole)
        except OSError as cause:
            raise LoopqError(
                f"{self._folder}: codes cannot be written ({cause.strerror}); they take a byte for each weight until "
                "the output is written: free some space, and start again to go on"
            ) from cause
        stored, self._room = self._room[: data.nbytes], self._room[whole:]
        self._at += whole
        return stored.view(array.dtype).reshape(array.shape)

    def _write(self, data: memoryview, whole: int) -> None:
        if len(self._room) < whole:
            self._at += len(self._room)
            size = max(CHUNK, whole)
            self._file.truncate(self._at + size)
            mapped = np.memmap(self._file, np.uint8, "r", self._at, (size,))
            self._room = mapped.view(np.ndarray)
        self._file.seek(self._at)
        # Written, not stored through the mapping: on a full disk a write raises an error, a mapping ends the process.
        while data.nbytes:
            data = data[self._file.write(data) :]
