"""Li, Sec. 6.2: size of Huginn's quantized projections, and cost of collecting on all steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loopq.paper.bench import Bench
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.run.config import QuantConfig
from loopq.storage.schema import Object

TITLE = "Size of the weights, and time of collection"
# Outputs, inputs and count of Huginn's shared projections (Li, App. Q): adapter, and four blocks of four.
HUGINN = ((5280, 10560, 1), (15840, 5280, 4), (5280, 5280, 4), (35840, 5280, 4), (5280, 17920, 4))
GROUP, TILE = 128, (256, 128)


def huginn_bytes(padded: bool) -> int:
    """Bytes of INT4 codes with a float16 scale per 128 inputs, padded to the tiles of the Marlin kernel."""
    total = 0
    for rows, columns, count in HUGINN:
        if padded:
            rows, columns = (-(-n // tile) * tile for n, tile in zip((rows, columns), TILE, strict=True))
        total += count * rows * (columns // 2 + 2 * -(-columns // GROUP))
    return total


def measure(bench: Bench) -> Object:
    """Add up the bytes of the model's layers. Time Hessians of step 0 and of all steps in CPU seconds."""
    layers = bench.solve(bench.rtn())
    dense = sum(2 * p.in_features * p.out_features for p in bench.collected.job.selection.observed)
    seconds = {}
    for steps in ("first", "all"):
        sums = bench.collected.sums(bench.collected.plan(QuantConfig.of(steps=steps, rank_threshold=None)))
        began = time.process_time()
        sums.run_pass(list(sums.steps))
        seconds[steps] = time.process_time() - began
    return bench.head() | {
        "dense": dense,
        "bytes": sum(q.n_bytes for q in layers.values()),
        "seconds": seconds,
    }


def show(results: Sequence[Found]) -> Shown:
    """The paper's model by arithmetic, and the models."""
    weights = sum(rows * columns * count for rows, columns, count in HUGINN)
    rows: list[tuple[str | None, ...]] = []
    for name, padded in (("as stored", False), ("padded to 256 x 128", True)):
        size = huginn_bytes(padded)
        cells = (f"{2 * weights / 1e9:.3f} GB", f"{size / 1e9:.3f} GB", f"{2 * weights / size:.2f}")
        rows.append((f"Huginn (paper), {name}", *cells, None, None, None))
    for f in results:
        first, every = f["seconds"]["first"], f["seconds"]["all"]
        cells = (f"{f['dense'] / 1e6:.3f} MB", f"{f['bytes'] / 1e6:.3f} MB", f"{f['dense'] / f['bytes']:.2f}")
        times = (f"{first:.2f}", f"{every:.2f}", f"{every / first:.2f}" if first else None)
        rows.append((f["model"], *cells, *times))
    text = (
        "bfloat16 weights against codes and scales of INT4 in groups of 128; CPU seconds of collecting the Hessians of "
        "step 0 and of all steps. The paper's 3.80x is that of padded tiles, which it does not say."
    )
    header = ("model", "bfloat16", "INT4", "ratio", "step 0 [s]", "all steps [s]", "all / step 0")
    return Shown([ShownTable(TITLE, text, header, tuple(rows))])


TABLES.register("size")(
    PaperTable(
        ("Section 6.2",),
        TITLE,
        "Huginn: 3.27 GB of bfloat16, 0.86 GB of INT4, 3.80 times less; collecting takes 15 minutes on one step "
        "and 25 on 32 steps, on one A100.",
        measure,
        show,
    )
)
