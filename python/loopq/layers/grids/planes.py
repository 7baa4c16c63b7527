"""Layout of numbers in the bytes of a GGUF block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Plane:
    """The `bits` from bit `shift` on of every number. A byte holds numbers that are a fraction of a chunk apart."""

    shift: int
    bits: int
    chunk: int

    def pack(self, numbers: Bytes) -> Bytes:
        """Pack numbers (n, numbers) into bytes (n, numbers * bits / 8)."""
        parts = 8 // self.bits
        kept = numbers >> self.shift & (1 << self.bits) - 1
        apart = kept.reshape(len(numbers), -1, parts, self.chunk // parts)
        return np.asarray(np.bitwise_or.reduce(apart << self._shifts, axis=2)).reshape(len(numbers), -1)

    def unpack(self, packed: Bytes) -> Bytes:
        """Return the bits that `pack` stored, in their place."""
        parts = 8 // self.bits
        apart = packed.reshape(len(packed), -1, 1, self.chunk // parts) >> self._shifts
        return np.asarray((apart & (1 << self.bits) - 1) << self.shift, np.uint8).reshape(len(packed), -1)

    def size(self, n_numbers: int) -> int:
        """Bytes of `n_numbers` numbers."""
        return n_numbers * self.bits // 8

    @property
    def _shifts(self) -> Bytes:
        return np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]


class Sixes:
    """Eight 6-bit scales and eight 6-bit offsets in 12 bytes. High bits of the last four lie above the first four."""

    def pack(self, numbers: Bytes) -> Bytes:
        """Bytes (n, 12) of scales and offsets (n, 16)."""
        first, last = np.split(self._turned(numbers), 2, axis=1)
        return np.hstack([first | last >> 4 << 6, last[:, :4] & 15 | last[:, 4:] << 4])

    def unpack(self, packed: Bytes) -> Bytes:
        """Return scales and offsets."""
        low = np.hstack([packed[:, 8:] & 15, packed[:, 8:] >> 4])
        return self._turned(np.hstack([packed[:, :8] & 63, low | packed[:, :8] >> 6 << 4]))

    def size(self, n_numbers: int) -> int:
        """12."""
        return 12

    @staticmethod
    def _turned(numbers: Bytes) -> Bytes:
        """Quarters in the order 0, 2, 1, 3."""
        return numbers.reshape(-1, 2, 2, 4).swapaxes(1, 2).reshape(-1, 16)


class Half:
    """A number in float16."""

    def pack(self, numbers: NDArray[np.float32]) -> Bytes:
        """Bytes (n, 2) of numbers (n,)."""
        return numbers.astype("<f2")[:, None].view(np.uint8)

    def unpack(self, packed: Bytes) -> NDArray[np.float32]:
        """Numbers (n, 1)."""
        return packed.view("<f2").astype(np.float32)

    def size(self, n_numbers: int) -> int:
        """2."""
        return 2
