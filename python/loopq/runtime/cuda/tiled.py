"""Cut a product of more than 32 tokens for `kernels/w4a16_tiled.cu`, the same on every machine.

A block takes 64 or 128 tokens and 256 or 128 outputs of a K slice. The cut decides the order of the partial sums. It
depends on the layer, the device and the number of 64-token groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from loopq.errors import ConfigError
from loopq.quantizers.cuda.load import DeviceLimits
from loopq.runtime.cuda.plan import (
    ACTIVATION_TYPES,
    L2_BYTES_PER_CLOCK,
    L2_CLOCKS,
    SCALE_TYPES,
    SLOTS_PER_CLOCK,
    TILE_ROWS,
    chip_of,
    fold_of,
)

WARPS = 8
WARP_TOKENS = 64
UNIT_FLOATS = 32 * WARP_TOKENS  # sums of one warp
_TILE_BYTES = 512
_SCALE_BYTES = {"f32": 4, "bf16": 2, "fp16": 2}
# Instructions that a warp issues per stage, by fold. They are counted in the machine code for compute capability 9.0
# (tests/runtime/cuda/test_nvrtc.py repeats it). Groups of 128 and longer add _FOLD_SLOTS at their end.
_STAGE_SLOTS = {0: 424, 1: 348, 2: 290}
_FOLD_SLOTS = 128
_RAMP_CLOCKS = 1500.0  # of a block, until its ring is full
_MAX_SLICES = 16
_DEPTHS = (6, 5, 4, 3, 2)


@dataclass(frozen=True)
class TiledVariant:
    """Compile-time parameters of the kernel."""

    activation: str  # of ACTIVATION_TYPES
    token_warps: int  # 1 or 2, each with 64 tokens of a block
    fold: int  # 0 for groups of 32, 1 for 64, 2 for longer
    stages: int
    scales: str = "f32"  # or "bf16", "fp16"

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"-DLQ_ACT={ACTIVATION_TYPES[self.activation]}",
            f"-DLQ_SCALE={SCALE_TYPES[self.scales]}",
            f"-DLQ_TOKEN_WARPS={self.token_warps}",
            f"-DLQ_FOLD={self.fold}",
            f"-DLQ_STAGES={self.stages}",
        )

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: 64 rows of K of the block's tokens and outputs, and their scales."""
        pairs = WARPS // self.token_warps
        x = WARP_TOKENS * self.token_warps * (TILE_ROWS * 2 + 16)
        scale_rows = 2 if self.fold == 0 else 1
        return x + 2 * pairs * _TILE_BYTES + scale_rows * pairs * 32 * _SCALE_BYTES[self.scales]

    @property
    def read_bytes(self) -> int:
        """Bytes of x and weights that a stage reads."""
        pairs = WARPS // self.token_warps
        return WARP_TOKENS * self.token_warps * TILE_ROWS * 2 + 2 * pairs * _TILE_BYTES


@dataclass(frozen=True)
class TiledPlan:
    """Grid (`blocks` of outputs and tokens, `slices` along K) and the launched variant."""

    variant: TiledVariant
    blocks: int
    slices: int
    group_shift: int
    token_groups: int  # of 64
    pairs: int  # of strips

    @property
    def shared_bytes(self) -> int:
        return self.variant.stages * self.variant.stage_bytes

    @property
    def token_blocks(self) -> int:
        """Number of blocks with the same outputs."""
        return -(-self.token_groups // self.variant.token_warps)

    @property
    def units(self) -> int:
        """Number of sums of 64 tokens and 32 outputs, each with a counter."""
        return self.token_groups * self.pairs

    @property
    def partial_floats(self) -> int:
        """Workspace of the slices."""
        return self.slices * self.units * UNIT_FLOATS if self.slices > 1 else 0


def stage_clocks(variant: TiledVariant, group_shift: int, device: DeviceLimits) -> float:
    """Estimated clocks of a block's stage. The slowest of tensor cores, issue slots and L2 reads decides."""
    products = TILE_ROWS * 32 * WARP_TOKENS * WARPS / chip_of(device).macs
    slots = _STAGE_SLOTS[variant.fold] + (_FOLD_SLOTS / 2**group_shift if variant.fold == 2 else 0)
    issue = WARPS * slots / SLOTS_PER_CLOCK
    return max(products, issue, variant.read_bytes / L2_BYTES_PER_CLOCK)


def _clocks(plan: TiledPlan, tiles: int, weight_bytes: float, device: DeviceLimits) -> float:
    """Estimated time: waves of blocks or the transfer of the weights from memory, then the joining of slices."""
    chip = chip_of(device)
    waves = -(-plan.blocks * plan.slices // device.multiprocessors)
    stream = waves * -(-tiles // plan.slices) * stage_clocks(plan.variant, plan.group_shift, device)
    stream = max(stream, weight_bytes / device.multiprocessors / chip.dram_bytes)
    if plan.slices == 1:
        return stream + waves * _RAMP_CLOCKS
    join = (2 + plan.slices) * L2_CLOCKS
    join += 2 * plan.partial_floats * 4 / device.multiprocessors / L2_BYTES_PER_CLOCK
    return stream + waves * _RAMP_CLOCKS + join


@lru_cache(maxsize=4096)
def make_tiled_plan(
    layer: tuple[int, int, int, int],
    tokens: int,
    device: DeviceLimits,
    activation: str = "bf16",
    scales: str = "f32",
    stages: int | None = None,
    slices: int | None = None,
) -> TiledPlan:
    """The cheapest cut that fits the device.

    `layer` has its outputs, the first and last input of the range and the group size. `stages` and `slices` fix the
    ring depth and the number of K slices (for measurements and tests).

    Raises
    ------
    ConfigError
        If no cut fits.
    """
    out_features, k_begin, k_end, group_size = layer
    fold, shift = fold_of(group_size)
    pairs = (out_features // 16 + 1) // 2
    tiles = -(-k_end // TILE_ROWS) - k_begin // TILE_ROWS
    groups = -(-tokens // WARP_TOKENS)
    weight_bytes = out_features * (k_end - k_begin) / 2
    best: tuple[float, TiledPlan] | None = None
    wide = 1 if groups == 1 else 2
    blocks = -(-pairs * wide // WARPS) * -(-groups // wide)
    for depth in _DEPTHS if stages is None else (stages,):
        variant = TiledVariant(activation, wide, min(fold, 2), depth, scales)
        if depth * variant.stage_bytes <= device.shared_bytes:
            break
    else:
        raise ConfigError(
            f"no ring of a product of {tokens} tokens fits a device with {device.shared_bytes} bytes of shared memory "
            f"per block"
        )
    for n_slices in range(1, min(_MAX_SLICES, tiles) + 1) if slices is None else (min(slices, tiles),):
        plan = TiledPlan(variant, blocks, n_slices, shift, groups, pairs)
        cost = _clocks(plan, tiles, weight_bytes, device)
        if best is None or cost < best[0]:
            best = (cost, plan)
    assert best is not None, "there is always one slice"
    return best[1]
