"""Cut one product into blocks and slices for the int4 kernel. Pure arithmetic, the same on every machine.

The cut decides the order of the partial sums. It depends on the layer and the device. Up to 16 tokens share one cut
and up to 32 another, so a token has the same bits among 1, 7 and 16 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from loopq.errors import ConfigError
from loopq.quantizers.cuda.load import DeviceLimits

TOKENS_PER_LAUNCH = 32
TILE_ROWS = 64
_STAGE_TILES = 2
_STAGE_WEIGHT_BYTES = 2048
_SLOT_BYTES = 1024  # float32 sums of one pair of strips for 8 tokens
_PER_CHANNEL_SHIFT = 30
# Rates per multiprocessor and clock that rank the cuts. docs/kernels.md gives their source. Only ratios matter.
L2_BYTES_PER_CLOCK = 24.0  # when all read at once
_L2_BYTES_PER_CLOCK_ALONE = 64.0
L2_CLOCKS = 700.0  # one round trip
# Instructions that a warp issues per stage, by fold and token tiles. They are counted in the machine code for compute
# capability 9.0 (tests/runtime/cuda/test_nvrtc.py repeats it). Then follows the issue rate of 4 schedulers.
_STAGE_SLOTS = {
    0: {1: 288, 2: 338, 4: 450},
    1: {1: 257, 2: 294, 4: 369},
    2: {1: 250, 2: 270, 4: 316},
    3: {1: 242, 2: 276, 4: 331},
}
SLOTS_PER_CLOCK = 4 * 0.75
_BUSY_WARPS = 12  # enough to saturate the memory
_MAX_SLICES = 32
_SLICES_AHEAD = {1: 8, 2: 6, 4: 4}  # kAhead in the kernel, by token tiles
_DEPTHS = (6, 5, 4, 3, 2)


ACTIVATION_TYPES = {"bf16": "Bf16", "fp16": "Fp16", "bf16-table": "TableBf16", "fp16-table": "TableFp16"}
SCALE_TYPES = {"f32": "ScaleF32", "bf16": "ScaleBf16", "fp16": "ScaleFp16"}
A100 = DeviceLimits(108, 166_912, (8, 0))
H200 = DeviceLimits(132, 232_448, (9, 0))


@dataclass(frozen=True)
class Chip:
    """Rates per multiprocessor that rank the cuts. Estimates that no GPU has measured yet."""

    dram_bytes: float  # a clock
    queue_bytes: int  # weights in flight that hide the memory's latency, with some margin
    macs: float  # per clock, for 16-bit mma.sync


_AMPERE = Chip(dram_bytes=11.0, queue_bytes=24 * 1024, macs=0.85 * 1024)
_HOPPER = Chip(dram_bytes=19.0, queue_bytes=48 * 1024, macs=0.62 * 2048)


def chip_of(device: DeviceLimits) -> Chip:
    """The constants of a device's generation."""
    return _HOPPER if device.capability >= (9, 0) else _AMPERE


@dataclass(frozen=True)
class GemmShape:
    """One product: K range `k_begin..k_end` of a layer, its outputs and its group size (-1: per channel)."""

    out_features: int
    k_begin: int
    k_end: int
    group_size: int
    token_tiles: int

    @property
    def pairs(self) -> int:
        return (self.out_features // 16 + 1) // 2

    @property
    def tiles(self) -> int:
        """Number of 64-row tiles. A range begins at a stage, so at an even tile."""
        first = self.k_begin // (TILE_ROWS * _STAGE_TILES) * _STAGE_TILES
        return -(-self.k_end // TILE_ROWS) - first

    @property
    def stages(self) -> int:
        return -(-self.tiles // _STAGE_TILES)


@dataclass(frozen=True)
class Variant:
    """Compile-time parameters of the kernel."""

    activation: str  # of ACTIVATION_TYPES
    token_tiles: int
    fold: int
    stages: int
    scales: str = "f32"  # or "bf16", "fp16"

    @property
    def threads(self) -> int:
        return 32 * max_warps(self.token_tiles)

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"-DLQ_ACT={ACTIVATION_TYPES[self.activation]}",
            f"-DLQ_SCALE={SCALE_TYPES[self.scales]}",
            f"-DLQ_MT={self.token_tiles}",
            f"-DLQ_FOLD={self.fold}",
            f"-DLQ_STAGES={self.stages}",
            f"-DLQ_THREADS={self.threads}",
        )


@dataclass(frozen=True)
class NarrowPlan:
    """Grid (`blocks` along the outputs, `slices` along K), warps per block, ring depth and shared memory."""

    blocks: int
    slices: int
    warps: int
    stages: int
    slice_tiles: int
    fold: int
    group_shift: int

    def shared_bytes(self, tokens: int, token_tiles: int) -> int:
        return _shared_bytes(self, tokens, token_tiles)


def fold_of(group_size: int) -> tuple[int, int]:
    """Compile-time fold mode and `group_shift` for a group size.

    Raises
    ------
    ConfigError
        If the kernel does not support this group size.
    """
    if group_size == -1:
        return 2, _PER_CHANNEL_SHIFT
    if group_size == 32:
        return 0, 0
    if group_size == 64:
        return 1, 0
    if group_size == 128:
        return 3, 1
    if group_size > 128 and group_size & (group_size - 1) == 0:
        return 2, (group_size // TILE_ROWS).bit_length() - 1
    raise ConfigError(
        f"the int4 kernel has group sizes 32, 64, 128 and larger powers of two, and -1 for per channel; "
        f"got {group_size}"
    )


def token_tiles_for(tokens: int) -> int:
    """Number of 8-token tiles in the compiled variant for `tokens` (at most 32) tokens."""
    return 1 if tokens <= 8 else 2 if tokens <= 16 else 4


def max_warps(token_tiles: int) -> int:
    # Registers per thread: up to 128 with 16 warps, 255 with 8.
    return 16 if token_tiles <= 2 else 8


def _stage_bytes(fold: int) -> int:
    return _STAGE_WEIGHT_BYTES + (4, 2, 1, 1)[fold] * 128


def _shared_bytes(plan: NarrowPlan, tokens: int, token_tiles: int) -> int:
    x = tokens * (plan.slice_tiles * TILE_ROWS * 2 + 16)
    ring = plan.stages * _stage_bytes(plan.fold)
    return x + plan.warps * (token_tiles * _SLOT_BYTES + ring)


def _clocks(shape: GemmShape, plan: NarrowPlan, token_tiles: int, device: DeviceLimits) -> float:
    """Estimated time of the busiest block: loading x, then weights, then joining the slices."""
    pairs = -(-shape.pairs // plan.blocks)
    stages = -(-plan.slice_tiles // _STAGE_TILES)
    queue = (plan.stages - 1) * plan.warps * _STAGE_WEIGHT_BYTES
    chip = chip_of(device)
    dram_rate = chip.dram_bytes * min(1.0, queue / chip.queue_bytes)
    issue_rate = SLOTS_PER_CLOCK * min(1.0, plan.warps / _BUSY_WARPS)
    stage = max(_stage_bytes(plan.fold) / dram_rate, _STAGE_SLOTS[plan.fold][token_tiles] / issue_rate)
    stream = -(-pairs * stages // plan.warps) * plan.warps * stage
    # The rings fill while x arrives. The rest of its transfer does not overlap with anything.
    x = token_tiles * 8 * plan.slice_tiles * TILE_ROWS * 2 / L2_BYTES_PER_CLOCK
    x_alone = max(0.0, x - queue / chip.dram_bytes)
    return stream + x_alone + join_clocks(pairs, plan, token_tiles)


def join_clocks(pairs: int, plan: NarrowPlan, token_tiles: int) -> float:
    """Estimated clocks for adding up the slices of a block's `pairs` pairs."""
    if plan.slices == 1:
        return 0.0
    # Each block writes partial sums and a counter. Then one block of `slices` reads all, a few slices at a time.
    trips = 2 + -(-plan.slices // _SLICES_AHEAD[token_tiles]) * -(-pairs // plan.warps)
    rate = min(_L2_BYTES_PER_CLOCK_ALONE, L2_BYTES_PER_CLOCK * plan.slices)
    return trips * L2_CLOCKS + pairs * plan.slices * token_tiles * _SLOT_BYTES / rate


@lru_cache(maxsize=4096)
def make_plan(
    shape: GemmShape, device: DeviceLimits, stages: int | None = None, slices: int | None = None
) -> NarrowPlan:
    """The cheapest cut that fits the device. `stages` and `slices` fix the ring depth and number of slices.

    Raises
    ------
    ConfigError
        If no cut fits.
    """
    fold, shift = fold_of(shape.group_size)
    # One cut for up to 16 tokens, another for up to 32, each chosen for the largest number of its class.
    class_tiles = 2 if shape.token_tiles <= 2 else 4
    shallowest = 3 if device.capability >= (9, 0) else 2
    depths = tuple(d for d in _DEPTHS if d >= shallowest) if stages is None else (stages,)
    best: tuple[float, NarrowPlan] | None = None
    most_slices = min(_MAX_SLICES, shape.stages, device.multiprocessors)
    # A slice without a stage would divide by zero.
    allowed = range(1, most_slices + 1)
    for n_slices in allowed if slices is None else {slices} & set(allowed):
        blocks = min(device.multiprocessors // n_slices, shape.pairs)
        slice_tiles = min(-(-shape.stages // n_slices) * _STAGE_TILES, shape.tiles)
        work = (shape.pairs // blocks) * (shape.stages // n_slices)
        most = max(1, min(max_warps(class_tiles), work))
        for warps in range(most, max(0, min(most, 4) - 1), -1):
            plan = NarrowPlan(blocks, n_slices, warps, 0, slice_tiles, fold, shift)
            depth = _deepest(plan, depths, class_tiles, device)
            if depth is None:
                continue
            plan = replace(plan, stages=depth)
            cost = _clocks(shape, plan, class_tiles, device)
            if best is None or cost < best[0]:
                best = (cost, plan)
    # The ring's depth does not change a sum, so fewer tokens may use a deeper one.
    depth = None if best is None else _deepest(best[1], depths, shape.token_tiles, device)
    if best is None or depth is None:
        raise ConfigError(
            f"no cut of {shape} fits a device with {device.shared_bytes} bytes of shared memory per block"
        )
    return replace(best[1], stages=depth)


def _deepest(plan: NarrowPlan, depths: tuple[int, ...], token_tiles: int, device: DeviceLimits) -> int | None:
    for depth in depths:
        if depth * _stage_bytes(plan.fold) < token_tiles * _SLOT_BYTES:
            continue
        if _shared_bytes(replace(plan, stages=depth), token_tiles * 8, token_tiles) <= device.shared_bytes:
            return depth
    return None
