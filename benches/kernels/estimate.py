"""Bounds of the kernel's cuts on paper: the table of docs/kernels.md. No GPU, no measurement.

usage (in the root of the repository): python -m benches.kernels.estimate [slots]

Registers are read from cubins that NVRTC makes (tests/support/cuda/nvrtc.py); the rest is the planner's own model
(python/loopq/runtime/cuda/plan.py) with a launch and the memory's latency added. `slots` counts what a warp issues for
one stage in the machine code instead (tests/support/cuda/sass.py; needs nvdisasm).
"""

from __future__ import annotations

import sys

from benches.kernels.shapes import HUGINN, Projection
from loopq.quantizers.cuda.sources import translation_unit
from loopq.runtime.cuda import plan as planner
from tests.support.cuda import nvrtc, sass

GHZ = 1.755
# Copy speeds in bytes per second: measured on these chips, read plus written.
CHIPS = {"H200": 4.3e12, "H100": 3.0e12}
LATENCY = 0.8e-6  # of memory under load: a guess
LAUNCH_US, RAMP_US = (
    1.0,
    0.7,
)  # from one kernel of a graph to the next, and until the first weights are there: guesses
SCALE_BYTES = 2


def row(layer: Projection, tokens: int) -> tuple[str, ...]:
    """One line of the table."""
    tiles = planner.token_tiles_for(tokens)
    shape = planner.GemmShape(layer.out_features, 0, layer.in_features, 128, tiles)
    plan = planner.make_plan(shape, planner.H200)
    variant = planner.Variant("bf16", tiles, plan.fold, plan.stages, "bf16")
    registers = nvrtc.resources(_cubin(variant), "loopq_w4a16_gemm").registers
    in_flight = (plan.stages - 1) * plan.warps * 2048
    cells = [
        layer.name, str(tokens), f"{plan.blocks} x {plan.slices}", f"{plan.warps} x {plan.stages}", str(registers),
        f"{plan.shared_bytes(tokens, tiles) // 1024}", f"{in_flight // 1024}",
    ]  # fmt: skip
    for copy in CHIPS.values():
        cells += [f"{copy / 132 * LATENCY / 1024:.0f}", *_time(layer, shape, plan, tokens, copy)]
    return tuple(cells)


def _cubin(variant: planner.Variant) -> bytes:
    source = translation_unit("w4a16_gemm.cu")
    return nvrtc.compile_cubin(source, "w4a16_gemm.cu", ["-arch=sm_90", "-std=c++17", *variant.defines])


def slots() -> None:
    """Instructions per stage and warp, by group size and tokens."""
    print("| groups | tokens | all | LOP3 | SHF | HFMA2 | HMMA | loads | the rest |")
    print(f"|{'---|' * 9}")
    for fold, group in ((0, "32"), (1, "64"), (3, "128"), (2, "256, per channel")):
        for tiles, depth in ((1, 6), (2, 4), (4, 4)):
            variant = planner.Variant("bf16", tiles, fold, depth, "bf16")
            counts = sass.stage_slots(sass.disassemble(_cubin(variant)))
            parts = [counts[op] for op in ("LOP3", "SHF", "HFMA2", "HMMA")]
            parts.append(counts["LDS"] + counts["LDSM"])
            cells = [group, f"to {8 * tiles}", counts.total()]
            print(f"| {' | '.join(map(str, [*cells, *parts, counts.total() - sum(parts)]))} |")


def _time(
    layer: Projection, shape: planner.GemmShape, plan: planner.NarrowPlan, tokens: int, copy: float
) -> tuple[str, str]:
    """Issue slots as a share of those that the stream leaves, and bandwidth as a share of the copy's."""
    rate = copy / planner.H200.multiprocessors / GHZ / 1e9
    stream = (2048 + 32 * SCALE_BYTES) / rate
    slots = planner.SLOTS_PER_CLOCK * min(1.0, plan.warps / planner._BUSY_WARPS)
    issue = planner._STAGE_SLOTS[plan.fold][shape.token_tiles] / slots
    pairs, stages = -(-shape.pairs // plan.blocks), -(-plan.slice_tiles // 2)
    x = tokens * plan.slice_tiles * 128 / planner.L2_BYTES_PER_CLOCK
    ring = (plan.stages - 1) * plan.warps * 2048 / rate
    clocks = pairs * stages * max(stream, issue) + max(0.0, x - ring)
    clocks += planner.join_clocks(pairs, plan, shape.token_tiles)
    seconds = clocks / GHZ / 1e9 + (LAUNCH_US + RAMP_US) * 1e-6
    return f"{issue / stream:.2f}", f"{layer.int4_bytes(128, SCALE_BYTES) / seconds / copy:.1%}"


def main() -> None:
    if sys.argv[1:] not in ([], ["slots"]):
        sys.exit("usage: python -m benches.kernels.estimate [slots]")
    if nvrtc.library() is None:
        sys.exit("no NVRTC: install the extra cuda12 or cuda13")
    if sys.argv[1:]:
        if sass.disassembler() is None:
            sys.exit("no nvdisasm: put CUDA's on the PATH, or install triton, whose wheel carries one")
        slots()
        return
    head = ["layer", "tokens", "blocks x slices", "warps x ring", "registers", "shared KB", "in flight KB"]
    for chip in CHIPS:
        head += [f"{chip}: needed KB", "issue / stream", "of copy speed"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for layer in HUGINN:
        for tokens in (1, 7, 16):
            print(f"| {' | '.join(row(layer, tokens))} |")


if __name__ == "__main__":
    main()
