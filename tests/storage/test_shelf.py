"""Arrays that wait on the disk come back as they are, in any number and of any size."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq.errors import LoopqError
from loopq.storage import shelf as module
from loopq.storage.shelf import Shelf


def test_arrays_are_what_was_put_and_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1 << 14)
    rng, shelf = np.random.default_rng(0), Shelf(tmp_path)
    # The third does not fit in what is left of a chunk, the fourth in none.
    arrays: list[Any] = [
        rng.integers(-8, 8, shape).astype(kind)
        for shape, kind in (
            ((3, 5), np.int8),
            ((90, 100), np.uint8),
            ((80, 100), np.int8),
            ((200, 100), np.float32),
        )
    ]
    stored = [shelf.put(a) for a in arrays]
    for got, array in zip(stored, arrays, strict=True):
        assert np.array_equal(got, array)
        assert got.dtype == array.dtype
        assert not got.flags.writeable
        base: Any = got
        while not isinstance(base, np.memmap):
            base = base.base
    assert not list(tmp_path.iterdir())
    del shelf
    assert np.array_equal(stored[3], arrays[3])


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(tmp_path)

    class Full:
        def __getattr__(self, name: str) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shelf, "_file", Full())
    with pytest.raises(LoopqError, match="No space left"):
        shelf.put(np.zeros(3, np.int8))
