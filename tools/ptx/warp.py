"""What a warp does beyond arithmetic: the memory, copy and barrier instructions that generated code calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tools.ptx.memory import Array, Clock, Global, Region, Shared, comes_first
from tools.ptx.numbers import LANES
from tools.ptx.parse import PtxError

if TYPE_CHECKING:
    from tools.ptx.compile import Program

FULL = np.ones(32, bool)
THREADS_PER_BLOCK = 1024
EVICT_FIRST, EVICT_NORMAL = 0x12F0000000000000, 0x16F0000000000000  # opaque: any two values would do
_POLICIES = np.array([EVICT_FIRST, EVICT_NORMAL], np.uint64)


@dataclass
class AsyncCopy:
    """cp.async of one instruction: word numbers and data per lane, and the group of each lane."""

    at: Array
    data: Array
    lanes: Array
    groups: Array


@dataclass(frozen=True)
class Fence:
    """A thread's fence.gpu: when, and where its warp stood between barriers."""

    thread: int  # of the grid
    time: int
    clock: Clock
    lane: int

    def covers(self, region: Region, piece: int) -> bool:
        """Whether a write of this block comes before it: of the same thread, or with a barrier between."""
        if int(region.writer[piece]) == self.thread:
            return int(region.when[piece]) < self.time
        stamp = np.array([[region.stamp[piece]]])
        return bool(comes_first(stamp, self.clock, np.array([self.lane]))[0, 0])


@dataclass
class Launch:
    """What all blocks of a launch share."""

    program: Program
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    parameters: dict[str, Array]
    memory: Global
    order: random.Random
    waits_for_earlier: bool  # launched so that it may overlap the kernel before it
    blocks_left: int  # basic blocks that may still run: what loops without end is stopped
    time: int = 0
    # Block and address: time of an atomic there, and the fence of its thread before it (None: there was none).
    counted: dict[tuple[int, int], tuple[int, Fence | None]] = field(default_factory=dict)


class WarpMemory:
    """32 threads and what they reach; `mask` is None where all lanes are active."""

    def __init__(self, launch: Launch, shared: Shared, block: int, number: int) -> None:
        self.launch, self.shared, self.block_number = launch, shared, block
        self.clock = Clock(number)
        self.waited = False
        self.committed = np.zeros(32, np.int64)
        self.copies: list[AsyncCopy] = []
        self.counters: set[int] = set()  # addresses of its atomics
        self.atomics = np.full(32, -1, np.int64)  # time of each lane's last atomic
        self.fences: dict[int, Fence] = {}  # each lane's last
        self.acquired: list[
            tuple[int, int, int]
        ] = []  # fences behind an atomic: time of the atomic, stamp, lane
        self.thread = block * THREADS_PER_BLOCK + number * 32 + LANES
        self.parameters = launch.parameters

    # ---- order --------------------------------------------------------------------------------------------------

    def together(self, mask: Array | None, members: Array) -> None:
        """Refuses an instruction for all lanes of a member mask that only some of them reach."""
        here = FULL if mask is None else mask
        wanted = members[here]
        if (wanted != wanted[0]).any():
            raise PtxError("lanes give different member masks")
        named = (int(wanted[0]) >> LANES) & 1 == 1
        if (here != named).any():
            missing = np.flatnonzero(named & ~here).tolist()
            raise PtxError(f"executed without lanes {missing} of its member mask {int(wanted[0]):#010x}")

    def from_lanes(self, mask: Array | None, source: Array) -> None:
        """Refuses a shuffle that reads a lane which does not take part."""
        if mask is not None and (mask & ~mask[source]).any():
            raise PtxError("reads a lane that does not take part")

    def all_together(self, mask: Array | None) -> None:
        if mask is not None and not mask.all():
            raise PtxError(
                f"executed by lanes {np.flatnonzero(mask).tolist()} only; the whole warp is needed"
            )

    def warp_barrier(self, mask: Array | None, members: Array) -> None:
        self.together(mask, members)
        self.all_together(mask)
        self.clock.warp_epoch += 1
        self.clock.tick()

    def fence(self, mask: Array | None) -> None:
        """fence.gpu: publishes what comes before it in these threads, and takes in what their atomics have seen."""
        self.launch.time += 1
        clock = Clock(self.clock.warp, self.clock.block_epoch, self.clock.warp_epoch)
        for lane in _lanes(mask).tolist():
            self.fences[lane] = Fence(int(self.thread[lane]), self.launch.time, clock, lane)
            if self.atomics[lane] >= 0:
                self.acquired.append((int(self.atomics[lane]), int(self.clock.stamps[lane]), lane))

    def earlier_kernel_done(self) -> None:
        self.waited = True

    # ---- shared memory ------------------------------------------------------------------------------------------

    def load_shared(self, mask: Array | None, addresses: Array, size: int) -> Array:
        """Words (size / 4, 32), or (1, 32) with the half word that `size` 2 asks for."""
        lanes = _lanes(mask)
        at = addresses[lanes]
        found = self.shared.read(at, size, self.clock, lanes)
        if size == 2:
            found = (found >> ((at & np.uint32(2)) * np.uint32(8))[:, None]) & np.uint32(0xFFFF)
        return _spread(found, lanes)

    def store_shared(self, mask: Array | None, addresses: Array, values: Sequence[Array]) -> None:
        lanes = _lanes(mask)
        self.shared.write(addresses[lanes], np.stack(values, axis=1)[lanes], self.clock, lanes)

    def load_matrices(self, mask: Array | None, addresses: Array, count: int) -> Array:
        """ldmatrix: lanes 8 i to 8 i + 7 give matrix i's rows; lane l gets elements 2 (l % 4), + 1 of row l / 4."""
        self.all_together(mask)
        rows = self.shared.read(addresses[: 8 * count], 16, self.clock, LANES[: 8 * count])
        return np.stack([rows[8 * i + LANES // 4, LANES % 4] for i in range(count)])

    # ---- global memory ------------------------------------------------------------------------------------------

    def load_global(self, mask: Array | None, addresses: Array, size: int, past_l1: bool) -> Array:
        """Words (size / 4, 32), or (1, 32) with a zero-extended half word."""
        lanes = _lanes(mask)
        return _spread(self._fetch(addresses[lanes], size, lanes, past_l1), lanes)

    def _fetch(self, addresses: Array, size: int, lanes: Array, past_l1: bool) -> Array:
        raw = np.empty((len(lanes), size), np.uint8)
        for region, places, offsets in self.launch.memory.find(addresses, size, lanes, writes=False):
            self._allowed(region)
            if region.writable:
                self._check_order(region, offsets, size, lanes[places], past_l1)
            raw[places] = region.data[offsets[:, None] + np.arange(size)]
        return raw.view(np.uint16).astype(np.uint32) if size == 2 else raw.view(np.uint32)

    def store_global(self, mask: Array | None, addresses: Array, values: Sequence[Array]) -> None:
        lanes = _lanes(mask)
        raw = np.stack(values, axis=1)[lanes].view(np.uint8)
        size = raw.shape[1]
        self.launch.time += 1
        for region, places, offsets in self.launch.memory.find(addresses[lanes], size, lanes, writes=True):
            self._allowed(region)
            self._check_order(region, offsets, size, lanes[places], past_l1=None)
            region.data[offsets[:, None] + np.arange(size)] = raw[places]
            pieces = offsets[:, None] // 2 + np.arange(size // 2)
            mine = np.broadcast_to(self.thread[lanes[places]][:, None], pieces.shape)
            region.writer[pieces] = mine
            region.when[pieces] = self.launch.time
            region.stamp[pieces] = self.clock.stamps[lanes[places]][:, None]
            if (region.writer[pieces] != mine).any():
                raise PtxError(f"two lanes write one element of {region.name} with one instruction")

    def atomic_add(self, mask: Array | None, addresses: Array, values: Array) -> Array:
        """atom.global.add.u32, lane after lane: the value before."""
        lanes = _lanes(mask)
        self.launch.time += 1
        for lane in lanes.tolist():
            address = int(addresses[lane])
            self.launch.counted[self.block_number, address] = self.launch.time, self.fences.get(lane)
            self.counters.add(address)
        self.atomics[lanes] = self.launch.time
        old = np.zeros(32, np.uint32)
        for region, places, offsets in self.launch.memory.find(addresses[lanes], 4, lanes, writes=True):
            self._allowed(region)
            for lane, offset in zip(lanes[places].tolist(), offsets.tolist(), strict=True):
                word = region.data[offset : offset + 4].view(np.uint32)
                old[lane] = word[0]
                word += values[lane]
        return old

    def _allowed(self, region: Region) -> None:
        if self.launch.waits_for_earlier and not self.waited and not region.constant:
            raise PtxError(
                f"{region.name} is used before griddepcontrol.wait: an earlier kernel may still write it"
            )

    def _check_order(
        self, region: Region, offsets: Array, size: int, lanes: Array, past_l1: bool | None
    ) -> None:
        """That no other thread wrote these bytes, or long enough ago. `past_l1` is None for a write."""
        pieces = offsets[:, None] // 2 + np.arange(max(size // 2, 1))
        writer = region.writer[pieces]
        other = (writer >= 0) & (writer != self.thread[lanes][:, None])
        if not other.any():
            return
        here = other & (writer // THREADS_PER_BLOCK == self.block_number)
        unordered = here & ~comes_first(region.stamp[pieces], self.clock, lanes)
        if unordered.any():
            raise PtxError(f"{region.name}: another thread of the block wrote this, with no barrier between")
        away = other & ~here
        if not away.any():
            return
        if past_l1 is None:
            raise PtxError(f"{region.name}: two blocks write one element")
        if not past_l1:
            raise PtxError(
                f"{region.name}: another block wrote this; L1 may hold what was before (use ld.global.cg)"
            )
        self._check_published(region, pieces, away, lanes)

    def _check_published(self, region: Region, pieces: Array, away: Array, lanes: Array) -> None:
        """Of another block's write: write, fence, atomic there; then atomic at the same address, fence, read here.

        By the letter of the PTX model: fence and atomic are of one thread each time, and barriers bring what other
        threads wrote to the fence, and what the fence took in to other threads. Atomics of other warps of this block
        do not count, even behind a block barrier.
        """
        for place, piece in np.argwhere(away):
            at = int(pieces[place, piece])
            block = int(region.writer[at]) // THREADS_PER_BLOCK
            found = (self.launch.counted.get((block, address)) for address in self.counters)
            times = [
                time for time, fence in filter(None, found) if fence is not None and fence.covers(region, at)
            ]
            if not times:
                raise PtxError(
                    f"{region.name}: another block wrote this, with no fence between that and an atomic"
                )
            lanes_here = lanes[place : place + 1]
            if not any(
                atomic > min(times) and comes_first(np.array([[stamp]]), self.clock, lanes_here)[0, 0]
                for atomic, stamp, _ in self.acquired
            ):
                raise PtxError(
                    f"{region.name}: another block wrote this, with no fence between an atomic and here"
                )

    # ---- copies -------------------------------------------------------------------------------------------------

    def copy(self, mask: Array | None, to: Array, source: Array, size: int, policy: Array | None) -> None:
        """cp.async: claims the destination now; the data is there for this thread after its wait."""
        lanes = _lanes(mask)
        _check_policy(policy, lanes)
        data = self._fetch(source[lanes], size, lanes, past_l1=True)
        at = self.shared.start_copy(to[lanes], size, self.clock, lanes)
        self.copies.append(AsyncCopy(at, data, lanes, self.committed[lanes]))

    def commit(self, mask: Array | None) -> None:
        self.committed = self.committed + (FULL if mask is None else mask)

    def wait(self, mask: Array | None, pending: int) -> None:
        """Lands this thread's groups, but for the `pending` latest; -1: also what is in no group."""
        here = FULL if mask is None else mask
        left = []
        for copy in self.copies:
            ready = copy.groups < self.committed[copy.lanes] - pending if pending >= 0 else copy.groups >= 0
            ready = ready & here[copy.lanes]
            if ready.any():
                self.shared.land(copy.at[ready], copy.data[ready], self.clock, copy.lanes[ready])
            if not ready.all():
                rest = ~ready
                left.append(AsyncCopy(copy.at[rest], copy.data[rest], copy.lanes[rest], copy.groups[rest]))
        self.copies = left


def _lanes(mask: Array | None) -> Array:
    return LANES if mask is None else np.flatnonzero(mask)


def _spread(values: Array, lanes: Array) -> Array:
    """(lane, word) of some lanes to (word, 32)."""
    if len(lanes) == 32:
        return np.ascontiguousarray(values.T)
    out = np.full((values.shape[1], 32), 0xFFFFFFFF, np.uint32)
    out[:, lanes] = values.T
    return out


def _check_policy(policy: Array | None, lanes: Array) -> None:
    if policy is not None and not np.isin(policy[lanes], _POLICIES).all():
        raise PtxError("the operand of .L2::cache_hint is no cache policy")
