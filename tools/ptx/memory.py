"""Memory of the interpreted machine: global arrays, and a block's shared memory that remembers who touched what.

Order is kept as stamps: (block barriers passed, warp barriers passed, thread). Of two accesses to one word by
different threads, the earlier comes first for certain only if a block barrier lies between them, or both threads are
of one warp and a warp barrier lies between. Anything else is reported if one of the two writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.ptx.parse import PtxError

Array = np.ndarray[Any, np.dtype[Any]]

UNWRITTEN, IN_FLIGHT = -1, -2
_BLOCK, _WARP = 40, 16  # bits below the counts of block and warp barriers; below that is the thread
_WARP_MASK = (1 << (_BLOCK - _WARP)) - 1
_ANY_LANE, _ANY_WARP = 0x8000, 0xFFFF  # in the thread's place: several lanes of a warp, several warps
SHARED_BASE = 0x400


@dataclass
class Clock:
    """Where the lanes of one warp stand between barriers."""

    warp: int
    block_epoch: int = 0
    warp_epoch: int = 0

    def __post_init__(self) -> None:
        self.threads = self.warp * 32 + np.arange(32, dtype=np.int64)
        self.tick()

    def tick(self) -> None:
        self.floor = self.block_epoch << _BLOCK
        self.stamp = self.floor | (self.warp_epoch << _WARP)
        self.stamps = self.stamp | self.threads

    def several(self, lanes: Array) -> int:
        """One stamp for what these lanes do now."""
        return int(self.stamps[lanes[0]]) if len(lanes) == 1 else self.stamp | _ANY_LANE | self.warp


def comes_first(stamps: Array, clock: Clock, lanes: Array) -> Array:
    """Whether accesses with these stamps (lane, word) are ordered before what `lanes` do now."""
    thread = stamps & 0xFFFF
    several = thread >= _ANY_LANE
    warp = np.where(several, thread & 0x7FFF, thread >> 5)
    earlier = ((stamps >> _WARP) & _WARP_MASK) < clock.warp_epoch
    same = thread == clock.threads[lanes][:, None]
    result: Array = (stamps < clock.floor) | ((warp == clock.warp) & (earlier | same))
    return result


class Shared:
    """A block's dynamic shared memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        words = -(-size // 16) * 4
        self.data = np.full(words, 0xFFFFFFFF, np.uint32)
        self.writers = np.full(words, UNWRITTEN, np.int64)
        self.readers = np.full(words, -1, np.int64)

    # ---- addresses ----------------------------------------------------------------------------------------------

    def _words(self, addresses: Array, size: int, lanes: Array) -> Array:
        """Word numbers (lane, size / 4) of accesses of `size` bytes."""
        at = addresses.astype(np.int64) - SHARED_BASE
        if (at < 0).any() or (at + size > self.size).any():
            bad = int(np.argmax((at < 0) | (at + size > self.size)))
            raise PtxError(f"lane {lanes[bad]}: shared access at byte {at[bad]} of {self.size}")
        if (at & (size - 1)).any():
            bad = int(np.argmax((at & (size - 1)) != 0))
            raise PtxError(f"lane {lanes[bad]}: shared access at byte {at[bad]} is not aligned to {size}")
        first: Array = at >> 2
        return first[:, None] + np.arange(-(-size // 4))

    # ---- reading and writing ------------------------------------------------------------------------------------

    def read(self, addresses: Array, size: int, clock: Clock, lanes: Array) -> Array:
        """Words (lane, size / 4); of a half word the whole word that holds it."""
        at = self._words(addresses, size, lanes)
        stamps = self.writers[at]
        if stamps.min() < 0 or stamps.max() >= clock.floor:
            self._check(stamps, at, clock, lanes, "read of")
        self._remember_readers(at, clock, lanes)
        return self.data[at]

    def write(self, addresses: Array, values: Array, clock: Clock, lanes: Array) -> None:
        """`values` are words (lane, size / 4)."""
        at = self._words(addresses, values.shape[1] * 4, lanes)
        self._claim(at, clock, lanes)
        mine = np.broadcast_to(clock.stamps[lanes][:, None], at.shape)
        self.writers[at] = mine
        self.data[at] = values
        if (self.writers[at] != mine).any():
            raise PtxError("two lanes write one shared word with one instruction")

    def _claim(self, at: Array, clock: Clock, lanes: Array) -> None:
        """Checks that nobody else may be using these words, and forgets their readers."""
        stamps = self.writers[at]
        if stamps.min() < UNWRITTEN or stamps.max() >= clock.floor:
            self._check(stamps, at, clock, lanes, "write to")
        readers = self.readers[at]
        if readers.max() >= clock.floor:
            bad = ~comes_first(readers, clock, lanes)
            self._refuse(bad, at, lanes, "write to", "that another thread reads, with no barrier between")
        self.readers[at] = -1

    def _check(self, stamps: Array, at: Array, clock: Clock, lanes: Array, what: str) -> None:
        reads = what == "read of"
        if reads:
            self._refuse(stamps == UNWRITTEN, at, lanes, what, "that is unwritten")
        self._refuse(stamps == IN_FLIGHT, at, lanes, what, "that is in flight (cp.async)")
        good = (stamps == UNWRITTEN) | comes_first(stamps, clock, lanes)
        self._refuse(~good, at, lanes, what, "that another thread writes, with no barrier between")

    def _refuse(self, bad: Array, at: Array, lanes: Array, what: str, why: str) -> None:
        if bad.any():
            lane, word = np.argwhere(bad)[0]
            raise PtxError(f"lane {lanes[lane]}: {what} shared byte {int(at[lane, word]) * 4} {why}")

    def _remember_readers(self, at: Array, clock: Clock, lanes: Array) -> None:
        old = self.readers[at]
        if len(lanes) == 32 and old.min() == old.max() == (clock.floor | _ANY_WARP):
            return
        mine = np.broadcast_to(clock.stamps[lanes][:, None], at.shape)
        if old.max() >= clock.floor:
            thread = old & 0xFFFF
            warp = np.where(thread >= _ANY_LANE, thread & 0x7FFF, thread >> 5)
            current = old >= clock.floor
            other = current & (thread != mine & 0xFFFF) & (old >> _WARP == clock.stamp >> _WARP)
            new = np.where(other, clock.stamp | _ANY_LANE | clock.warp, mine)
            new = np.where(current & (warp != clock.warp), clock.floor | _ANY_WARP, new)
        else:
            new = mine
        self.readers[at] = new
        lost = (self.readers[at] != new) & (new & 0xFFFF != _ANY_WARP)
        if lost.any():  # several lanes read one word at once
            self.readers[at[lost]] = clock.stamp | _ANY_LANE | clock.warp

    # ---- copies of 16 bytes per thread --------------------------------------------------------------------------

    def start_copy(self, addresses: Array, size: int, clock: Clock, lanes: Array) -> Array:
        at = self._words(addresses, size, lanes)
        self._claim(at, clock, lanes)
        self.writers[at] = IN_FLIGHT
        self.data[at] = 0xFFFFFFFF
        return at

    def land(self, at: Array, values: Array, clock: Clock, lanes: Array) -> None:
        """The data of copies that these lanes have waited for: as if they wrote it now."""
        self.data[at] = values
        self.writers[at] = clock.stamps[lanes][:, None]


@dataclass
class Region:
    """An array in global memory; writable ones remember who wrote each 2 bytes of them."""

    name: str
    base: int
    data: Array  # uint8, shape (bytes,)
    writable: bool = False
    constant: bool = False  # no earlier kernel writes it: may be read before griddepcontrol.wait

    def __post_init__(self) -> None:
        pieces = -(-len(self.data) // 2) if self.writable else 0
        self.writer = np.full(pieces, -1, np.int64)  # thread of the grid
        self.when = np.zeros(pieces, np.int64)  # the machine's time
        self.stamp = np.full(pieces, -1, np.int64)  # within the writer's block

    @property
    def end(self) -> int:
        return self.base + len(self.data)


class Global:
    """The arrays a launch may touch, by address."""

    def __init__(self, regions: Iterable[Region]) -> None:
        # Where arrays overlap (an operation in place) the writable one is found first.
        self.regions = sorted(regions, key=lambda region: not region.writable)

    def find(
        self, addresses: Array, size: int, lanes: Array, writes: bool
    ) -> list[tuple[Region, Array, Array]]:
        """Arrays that hold the accesses; of each, positions in `addresses` and byte offsets.

        Raises
        ------
        PtxError
            If an access is not aligned, outside of every array, or writes one that is only read.
        """
        wrong = (addresses & np.uint64(size - 1)) != 0
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise PtxError(
                f"lane {lanes[bad]}: global address {int(addresses[bad]):#x} is not aligned to {size}"
            )
        found = []
        left = np.arange(len(addresses))
        for region in self.regions:
            inside = (addresses[left] >= region.base) & (addresses[left] + np.uint64(size) <= region.end)
            if inside.any():
                if writes and not region.writable:
                    raise PtxError(
                        f"lane {lanes[left[inside][0]]}: write to {region.name}, which is only read"
                    )
                offsets = (addresses[left[inside]] - np.uint64(region.base)).astype(np.int64)
                found.append((region, left[inside], offsets))
                left = left[~inside]
                if not len(left):
                    return found
        raise PtxError(self._explain(int(addresses[left[0]]), size, int(lanes[left[0]])))

    def _explain(self, address: int, size: int, lane: int) -> str:
        near = min(self.regions, key=lambda r: min(abs(address - r.base), abs(address - r.end)))
        return (
            f"lane {lane}: access of {size} bytes at byte {address - near.base} of {near.name}, outside memory: "
            f"it has {len(near.data)}"
        )
