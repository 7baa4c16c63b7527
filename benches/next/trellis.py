"""A bitshift trellis down the outputs of one column (QTIP: Tseng et al., arXiv:2406.11235).

The codes of a column are a cyclic stream of `bits` bits a row; the value of a row is a function of the `memory` bits
that end with its own, so that every row is decoded alone, by one shift, one mask and the function. Values are those of
1MAD: the sum of the four bytes of a linear congruence, nearly normal. A file holds `bits` bits a weight and the scales.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benches.next.sides import Matrix, pivots

SOURCE = Path(__file__).with_name("viterbi.rs")
BUILT = Path(__file__).resolve().parents[2] / ".cache" / "next"


@cache
def one_mad(memory: int) -> NDArray[np.float64]:
    """Value of each state: (sum of the bytes of (34038481 x + 76625530) mod 2^32 - 510) / 147.8."""
    x = (np.arange(1 << memory, dtype=np.uint64) * 34038481 + 76625530) % (1 << 32)
    total = sum((x >> np.uint64(8 * i)) & np.uint64(255) for i in range(4))
    return (np.asarray(total, dtype=np.float64) - 510) / 147.8


@cache
def library() -> ctypes.CDLL:
    """The search, built once for each text of it; needs rustc."""
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = BUILT / f"viterbi-{name}.so"
    if not path.is_file():
        BUILT.mkdir(parents=True, exist_ok=True)
        flags = ["-O", "-C", "target-cpu=native", "--edition", "2021", "--crate-type", "cdylib"]
        subprocess.run(["rustc", *flags, "-o", str(path), str(SOURCE)], check=True)
    found = ctypes.CDLL(str(path))
    size, floats = ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)
    found.column.argtypes = [size, size, size, *[floats] * 5, ctypes.POINTER(ctypes.c_uint32)]
    found.column.restype = None
    return found


@dataclass
class Trellis:
    """The trellis in the metric A between rows.

    Parameters
    ----------
    left : ndarray, float64, shape (out_features, out_features)
        A.
    bits : int
        Bits a weight.
    memory : int
        Bits that a value depends on: 2^memory states.
    """

    left: Matrix
    bits: int
    memory: int

    def __post_init__(self) -> None:
        pivot, coupling = pivots(self.left)
        # The search is in float32: sizes are brought near one.
        self._pivot = _float(pivot / pivot.mean())
        self._coupling = _float(coupling)
        self._values = _float(one_mad(self.memory).reshape(-1, 1 << self.bits).T)

    def encode(self, target: Matrix, scale: Matrix) -> Matrix:
        """Return the values of a path of the trellis whose scaled values are near the target in the metric A."""
        rows = len(target)
        size = float(np.sqrt(np.mean(np.square(scale)))) or 1.0
        states = np.zeros(rows, dtype=np.uint32)
        arguments = [self._values, _float(target / size), _float(scale / size), self._pivot, self._coupling]
        library().column(
            rows,
            self.bits,
            self.memory,
            *[a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in arguments],
            states.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
        )
        # From the digits alone, as a reader of the file would have them.
        return decode(states.astype(np.int64) & ((1 << self.bits) - 1), self.bits, self.memory)


def decode(stream: NDArray[np.int64], bits: int, memory: int) -> NDArray[np.float64]:
    """Values of a column from its cyclic stream, one digit of `bits` bits for each row."""
    state = np.zeros(len(stream), dtype=np.int64)
    for back in range(-(-memory // bits) - 1, -1, -1):
        state = state << bits | np.roll(stream, back)
    return one_mad(memory)[state & ((1 << memory) - 1)]


def _float(values: Matrix) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)
