"""Memory of the interpreted machine: global arrays, and a block's shared memory that remembers who touched what.

Order is kept as stamps: (block barriers passed, warp barriers passed, thread). Of two accesses to one word by
different threads, the earlier comes first for certain only if a block barrier lies between them, or both threads are
of one warp and a warp barrier lies between. Anything else is reported if one of the two writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.ptx.parse import PtxError

Array = np.ndarray[Any, np.dtype[Any]]

UNWRITTEN, IN_FLIGHT, BARRIER, FIRST_BULK = -1, -2, -3, -16
_BLOCK, _WARP = 40, 16  # bits below the counts of block and warp barriers; below that is the thread
_WARP_MASK = (1 << (_BLOCK - _WARP)) - 1
_ANY_LANE, _ANY_WARP = 0x8000, 0xFFFF  # in the thread's place: several lanes of a warp, several warps
SHARED_BASE = 0x400
BULK_STEP = 16


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


@dataclass
class BulkCopy:
    """One cp.async.bulk: its bytes land at some time, and are seen by those who saw its phase complete."""

    start: int
    data: Array
    barrier: int
    seen: list[tuple[Clock, int, int, Array]] = field(default_factory=list)  # warp, its epochs, lanes

    def visible(self, clock: Clock, lanes: Array) -> Array:
        found = np.zeros(len(lanes), bool)
        for by, block_epoch, warp_epoch, mask in self.seen:
            if block_epoch < clock.block_epoch or (by.warp == clock.warp and warp_epoch < clock.warp_epoch):
                found[:] = True
            elif by.warp == clock.warp:
                found |= mask[lanes]
        return found


@dataclass
class Barrier:
    """An mbarrier object."""

    expected: int
    made_by: Clock
    pending: int = 0
    transactions: int = 0
    phase: int = 0
    fenced: bool = False
    landed: list[BulkCopy] = field(default_factory=list)  # in the phase under way
    before: list[BulkCopy] = field(default_factory=list)  # in the last complete one

    def __post_init__(self) -> None:
        self.pending = self.expected

    def settle(self) -> None:
        """Completes the phase if nothing is missing."""
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            self.before, self.landed = self.landed, []


class Shared:
    """A block's dynamic shared memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        words = -(-size // 16) * 4
        self.data = np.full(words, 0xFFFFFFFF, np.uint32)
        self.writers = np.full(words, UNWRITTEN, np.int64)
        self.readers = np.full(words, -1, np.int64)
        self.copies: list[BulkCopy] = []
        self.under_way: list[BulkCopy] = []
        self.barriers: dict[int, Barrier] = {}

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
        self._refuse(stamps == BARRIER, at, lanes, what, "that holds an mbarrier")
        bulk = stamps <= FIRST_BULK
        good = (stamps == UNWRITTEN) | comes_first(stamps, clock, lanes)
        if bulk.any():
            for number in np.unique(stamps[bulk]):
                copy = self.copies[FIRST_BULK - int(number)]
                good = np.where(stamps == number, copy.visible(clock, lanes)[:, None], good)
            self._refuse(bulk & ~good, at, lanes, what, "that is in flight (cp.async.bulk)")
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

    # ---- bulk copies and mbarriers ------------------------------------------------------------------------------

    def barrier(self, address: int) -> Barrier:
        if address % 8:
            raise PtxError(f"mbarrier at shared byte {address - SHARED_BASE} is not aligned to 8")
        found = self.barriers.get(address)
        if found is None:
            raise PtxError(f"mbarrier at shared byte {address - SHARED_BASE} is not initialised")
        return found

    def make_barrier(self, address: int, arrivals: int, clock: Clock, lane: int) -> None:
        lanes = np.array([lane])
        at = self._words(np.array([address]), 8, lanes)
        if not 1 <= arrivals < 1 << 20:
            raise PtxError(f"mbarrier.init with {arrivals} arrivals; 1 to {(1 << 20) - 1} are allowed")
        if address in self.barriers:
            raise PtxError(f"mbarrier at shared byte {address - SHARED_BASE} is initialised twice")
        self._claim(at, clock, lanes)
        self.writers[at] = BARRIER
        self.barriers[address] = Barrier(arrivals, Clock(clock.warp, clock.block_epoch, clock.warp_epoch))

    def used(self, address: int, clock: Clock) -> Barrier:
        """A barrier that a warp uses; its initialisation must come first."""
        found = self.barrier(address)
        made = found.made_by
        if made.block_epoch == clock.block_epoch and (
            made.warp != clock.warp or made.warp_epoch == clock.warp_epoch
        ):
            raise PtxError("mbarrier is used with no barrier between its initialisation and here")
        return found

    def arrive(self, address: int, transactions: int, clock: Clock) -> None:
        barrier = self.used(address, clock)
        if barrier.pending == 0:
            raise PtxError("mbarrier.arrive: more arrivals than the phase expects")
        barrier.transactions += transactions
        barrier.pending -= 1
        barrier.settle()

    def start_bulk(self, address: int, data: Array, barrier: int, clock: Clock, lane: int) -> None:
        """`data` are the words of the copy; address and size are multiples of 16 (checked by the caller)."""
        if not self.used(barrier, clock).fenced:
            raise PtxError("cp.async.bulk on an mbarrier whose initialisation has no fence.mbarrier_init")
        lanes = np.array([lane])
        first = self._words(np.array([address]), 16, lanes)[0, 0]
        self._words(np.array([address + data.nbytes - 16]), 16, lanes)
        at = (first + np.arange(len(data)))[None, :]
        self._claim(at, clock, lanes)
        self.data[at] = 0xFFFFFFFF
        copy = BulkCopy(int(first), data, barrier)
        self.writers[at] = FIRST_BULK - len(self.copies)
        self.copies.append(copy)
        self.under_way.append(copy)

    def land_bulk(self, index: int) -> None:
        """One bulk copy arrives and reports its bytes."""
        copy = self.under_way.pop(index)
        self.data[copy.start : copy.start + len(copy.data)] = copy.data
        barrier = self.barrier(copy.barrier)
        barrier.transactions -= copy.data.nbytes
        barrier.landed.append(copy)
        barrier.settle()

    def observe(self, address: int, parity: int, clock: Clock, lanes: Array) -> bool:
        """try_wait.parity of lanes with one barrier: true if the phase of that parity is complete."""
        barrier = self.used(address, clock)
        if barrier.phase & 1 == parity & 1:
            return False
        mask = np.zeros(32, bool)
        mask[lanes] = True
        for copy in barrier.before:
            copy.seen.append((clock, clock.block_epoch, clock.warp_epoch, mask))
        return True


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
