"""What quantizing a large looped model takes on 1, 8 and 64 GPUs: `python -m benches.growth` writes docs/howto/gpus.md.

Time, memory and network by counting: work of rollouts, Hessians and solves from the shapes (the solver's own numbers,
`Method.work`), the processor's rate from the record of a dump of Huginn's size. No GPU has been measured: its rates are
shares of its data sheet, and stand in the table. Batches and layers are then claimed one after the other by whoever is
free, as `collect` and `solve --worker` do, also with one rank lost halfway.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path

from benches.pages import into
from loopq.quantizers import QUANTIZERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "howto" / "gpus.md"
#: Calibration text: as many tokens as GPTQ's authors take.
PROMPTS, LENGTH = 128, 2048
#: Batches of one GPU; each further GPU has one at least.
BATCHES = 16
#: An H200 of 141 GB at 40 % of its dense bf16 rate and 60 % of its float32 and memory rates.
BF16, FLOAT32, MEMORY, ROOM = 400e12, 40e12, 2.9e12, 130e9
#: What a shared folder takes from all machines together, bytes a second; processor cores beside each GPU.
FOLDER, CORES = 10e9, 16
#: Seconds after which the claim of a lost process is taken over.
STALE = 120.0
#: Bytes of an exact sum in the folder, and on a GPU, where the upper triangle lies in strips of full rows.
SAVED, HELD = 8, 9


@dataclass(frozen=True)
class Loop:
    """A looped model: its core as (outputs, inputs) of each matrix, by distinct input, and how often it runs."""

    name: str
    block: tuple[tuple[int, tuple[int, ...]], ...]
    n_blocks: int
    n_steps: int

    @property
    def weights(self) -> int:
        """Weights of the core."""
        return self.n_blocks * sum(width * sum(outputs) for width, outputs in self.block)

    @property
    def squares(self) -> int:
        """Columns squared, summed over the distinct inputs."""
        return self.n_blocks * sum(width**2 for width, _ in self.block)

    def solves(self, method: str) -> list[float]:
        """Multiply-adds of each input's layers, in those of a Hessian."""
        per_factor, per_column, per_weight = QUANTIZERS.get(method)().work
        one = [
            per_factor * width**3 + sum(outputs) * width * (per_column * width + per_weight)
            for width, outputs in self.block
        ]
        return one * self.n_blocks


def llama(name: str, width: int, mlp: int, kv: int, n_blocks: int, n_steps: int) -> Loop:
    """A loop of Llama's blocks."""
    block = ((width, (width, kv, kv)), (width, (width,)), (width, (mlp, mlp)), (mlp, (width,)))
    return Loop(name, block, n_blocks, n_steps)


LOOPS = (
    llama("Ouro-2.6B", 2048, 5632, 2048, 48, 4),
    llama("a loop of 40 B", 8192, 28672, 1024, 46, 8),
)


def makespan(tasks: list[float], workers: int, lost_at: float | None = None) -> float:
    """Seconds until all tasks are done by workers that claim the next as soon as they are free.

    With `lost_at` the worker that is free first after that moment is gone: what it had claimed is done by another once
    the claim is stale.
    """
    free = [0.0] * workers
    heapq.heapify(free)
    waiting: list[float] = []
    end = 0.0
    for seconds in tasks:
        began = heapq.heappop(free)
        if lost_at is not None and began + seconds > lost_at and workers > 1:
            waiting.append(seconds)
            lost_at = None
            continue
        end = max(end, began + seconds)
        heapq.heappush(free, began + seconds)
    for seconds in waiting:
        end = max(end, max(heapq.heappop(free), STALE) + seconds)
    return end


def rate() -> float:
    """Multiply-adds of an accumulation a second and core, factors and solves included, as the estimate counts them."""
    record = json.loads((ROOT / "benches/record/huginn-2026-11-21.json").read_text())
    layers, cores = record["results"]["layers"], record["about"]["threads"]
    per_factor, per_column, per_weight = QUANTIZERS.get("gptq")().work
    work = sum(
        per_factor * r["dim"] ** 3 + r["m"] * r["dim"] * (per_column * r["dim"] + per_weight) for r in layers
    )
    return float(work / sum(r["factor"] + r["solve"] for r in layers) / cores)


@dataclass(frozen=True)
class Cost:
    """Seconds of a run's halves, of both with a rank lost; passes; GiB of sums on a GPU and through the folder."""

    collect: float
    solve: float
    lost: float
    passes: int
    held: float
    network: float


def cost(loop: Loop, gpus: int, method: str) -> Cost:
    """Count one run."""
    tokens = PROMPTS * LENGTH
    n_batches = max(BATCHES, gpus)
    held = HELD * loop.squares
    # Sums of some inputs in each pass where all do not fit beside the weights.
    passes = math.ceil(held / (ROOM - 2 * loop.weights))
    rollout = 2 * loop.weights * loop.n_steps * tokens / BF16
    rows = tokens * loop.n_steps
    hessians = loop.squares * rows / FLOAT32 + loop.squares / 2 * 36 * rows / 512 / MEMORY
    batch = (rollout * passes + hessians) / n_batches
    # Saved once a minute and at the end, for at most a tenth of the time; whoever writes the dump reads all of it.
    saved = SAVED * loop.squares * gpus
    moving = 2 * saved / FOLDER
    collect = makespan([batch] * n_batches, gpus)
    solves = sorted((w / (rate() * CORES) for w in loop.solves(method)), reverse=True)
    solve = makespan(solves, gpus)
    lost = makespan([batch] * n_batches, gpus, collect / 2) + makespan(solves, gpus, solve / 2)
    return Cost(collect + moving, solve, lost + moving, passes, held / passes / 2**30, saved / 2**30)


def table() -> str:
    """The table and what it assumes."""
    lines = [
        f"{PROMPTS} prompts of {LENGTH} tokens. Assumed, since no GPU was measured: an H200 at {BF16 / 1e12:.0f} "
        f"Tflop/s in bfloat16, {FLOAT32 / 1e12:.0f} in float32 and {MEMORY / 1e12:.1f} TB/s, {CORES} cores beside "
        f"each, a folder of {FOLDER / 1e9:.0f} GB/s. Measured: a core's rate of factors and solves (two cores of a "
        "Zen 4).",
        "",
        "| model | GPUs | passes | sums on a GPU, GiB | through the folder, GiB | collect | solve `gptq` "
        "| with a rank lost in each half | solve, default without gradients |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for loop in LOOPS:
        for gpus in (1, 8, 64):
            plain, default = cost(loop, gpus, "gptq"), cost(loop, gpus, "gptq-cd")
            lost = clock(plain.lost) if gpus > 1 else "started anew"
            times = [clock(plain.collect), clock(plain.solve), lost, clock(default.solve)]
            lines.append(
                f"| {loop.name}, {loop.n_steps} steps | {gpus} | {plain.passes} | {plain.held:.0f} "
                f"| {plain.network:.0f} | {' | '.join(times)} |"
            )
    return "\n".join(lines)


def clock(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    text = table()
    print(text)
    into(PAGE, "growth", text)
