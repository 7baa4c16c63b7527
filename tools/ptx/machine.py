"""Blocks and warps of an interpreted launch: registers, divergence, and scheduling in seeded random order."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.ptx.compile import UNWRITTEN_REGISTER, Program
from tools.ptx.memory import Array, Global, Shared
from tools.ptx.numbers import LANES
from tools.ptx.parse import PtxError
from tools.ptx.warp import FULL, THREADS_PER_BLOCK, Launch, WarpMemory

_QUANTA = (1, 2, 4, 48)  # basic blocks that a warp runs before another may


@dataclass
class Path:
    """Lanes that run together: at the start of `block`, until they reach `meet`."""

    block: int
    meet: int
    mask: Array


class Warp(WarpMemory):
    """32 threads: registers and the paths on which their lanes are."""

    def __init__(self, block: BlockRun, number: int) -> None:
        super().__init__(block.launch, block.shared, block.number, number)
        self.block = block
        self.paths = [Path(0, -1, FULL)]
        self.at_barrier = False
        self.registers = self._start()

    def _start(self) -> list[Any]:
        launch = self.launch
        values = {"%laneid": LANES, "%warpid": self.clock.warp, "%tid.x": self.clock.threads}
        values |= {"%tid.y": 0, "%tid.z": 0, "%ntid.x": launch.threads, "%ntid.y": 1, "%ntid.z": 1}
        values |= {"%ctaid.x": self.block.x, "%ctaid.y": self.block.y, "%ctaid.z": 0}
        values |= {"%nctaid.x": launch.grid[0], "%nctaid.y": launch.grid[1], "%nctaid.z": 1}
        registers: list[Any] = [UNWRITTEN_REGISTER] * len(launch.program.slots)
        for name, value in values.items():
            registers[launch.program.slots[name]] = np.full(32, value, np.uint32)
        return registers

    @property
    def done(self) -> bool:
        return not self.paths

    # ---- control ------------------------------------------------------------------------------------------------

    def run(self, blocks: int) -> None:
        """Runs up to `blocks` basic blocks, or to a block barrier or the end."""
        program = self.launch.program
        self.launch.blocks_left -= blocks
        for _ in range(blocks):
            path = self.paths[-1]
            if path.block == path.meet:
                self.paths.pop()
                continue
            block = program.kernel.blocks[path.block]
            full = path.mask is FULL
            try:
                taken = program.function(path.block, full)(self, self.registers, None if full else path.mask)
            except (PtxError, TypeError) as error:
                raise PtxError(self._describe(error)) from error
            if block.branch is None or block.branch.words[0] == "bra":
                self._jump(path, block.target, block.next, taken)
            else:
                self._exit(path, block.next, taken)
            if block.pause:
                self.at_barrier = True
                return
            if not self.paths:
                return

    def _describe(self, error: Exception) -> str:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<ptx ")]
        where = self.launch.program.describe(frames[-1].filename, frames[-1].lineno or 0) if frames else ""
        place = f"block ({self.block.x}, {self.block.y}) warp {self.clock.warp}"
        return f"{self.launch.program.kernel.name} {place}: {error}; at {where}"

    def _jump(self, path: Path, target: int, following: int, taken: Array | None) -> None:
        if taken is None:
            path.block = target if target >= 0 else following
            return
        yes = taken if path.mask is FULL else taken & path.mask
        count = np.count_nonzero(yes)
        if count == 0:
            path.block = following
        elif count == (32 if path.mask is FULL else np.count_nonzero(path.mask)):
            path.block = target
        else:
            meet = self.launch.program.kernel.meeting[path.block]
            if meet == path.meet:
                self.paths.pop()
            else:
                path.block = meet
            parts = [Path(target, meet, yes), Path(following, meet, path.mask & ~yes)]
            if self.launch.order.random() < 0.5:
                parts.reverse()
            self.paths += [part for part in parts if part.block != meet]

    def _exit(self, path: Path, following: int, taken: Array | None) -> None:
        gone = path.mask if taken is None else taken & path.mask
        path.block = following
        for other in self.paths:
            if (other.mask & gone).any():
                other.mask = other.mask & ~gone
        self.paths = [other for other in self.paths if other.mask.any()]


class BlockRun:
    """One block of the grid."""

    def __init__(self, launch: Launch, x: int, y: int) -> None:
        self.launch, self.x, self.y = launch, x, y
        self.number = y * launch.grid[0] + x
        self.shared = Shared(launch.shared_bytes)
        self.warps = [Warp(self, i) for i in range(launch.threads // 32)]

    @property
    def done(self) -> bool:
        return all(warp.done for warp in self.warps)

    def step(self) -> None:
        """Lets one warp run for a while, or opens the block barrier."""
        order = self.launch.order
        live = [warp for warp in self.warps if not warp.done]
        ready = [warp for warp in live if not warp.at_barrier]
        if ready:
            warp = order.choice(ready)
            warp.run(order.choice(_QUANTA))
        elif len(live) == len(self.warps):
            for warp in live:
                warp.at_barrier = False
                warp.clock.block_epoch += 1
                warp.clock.warp_epoch += 1
                warp.clock.tick()
        else:
            raise PtxError(
                f"deadlock in block ({self.x}, {self.y}): {len(live)} of {len(self.warps)} warps at a block barrier"
            )


def launch(
    program: Program,
    grid: tuple[int, int],
    threads: int,
    shared_bytes: int,
    arguments: Sequence[Any],
    memory: Global,
    seed: int = 0,
    overlap: bool = False,
    limit: int = 5_000_000,
) -> None:
    """Runs one launch to its end.

    Parameters
    ----------
    program : Program
    grid, threads, shared_bytes
        As a launch has them; blocks are one row of `threads` threads.
    arguments : sequence of int (pointers), numpy.int32, numpy.float32
        In the order of the kernel's parameters.
    memory : Global
        The arrays it may touch; they are written in place.
    seed : int
        Of the order of blocks, warps and diverged lanes.
    overlap : bool
        Refuse whatever touches an array that is not `constant` before griddepcontrol.wait.
    limit : int
        Basic blocks after which the launch counts as one without end.

    Raises
    ------
    PtxError
        On anything that the PTX ISA does not allow.
    """
    kernel = program.kernel
    if threads % 32 or not 0 < threads <= (kernel.max_threads or THREADS_PER_BLOCK):
        raise PtxError(f"{kernel.name}: {threads} threads; it is compiled for {kernel.max_threads}")
    parameters = program.bind(arguments)
    order = random.Random(seed)
    run = Launch(program, grid, threads, shared_bytes, parameters, memory, order, overlap, limit)
    coming = [(x, y) for y in range(grid[1]) for x in range(grid[0])]
    order.shuffle(coming)
    at_once = order.randint(1, 6)
    resident: list[BlockRun] = []
    with np.errstate(all="ignore"):
        while coming or resident:
            while coming and len(resident) < at_once:
                resident.append(BlockRun(run, *coming.pop()))
            block = order.choice(resident)
            block.step()
            if block.done:
                resident.remove(block)
            if run.blocks_left < 0:
                raise PtxError(f"{kernel.name}: no end after {limit} basic blocks")
