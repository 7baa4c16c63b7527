"""A frontier: accuracy by difficulty and number of loops, before and after quantization.

`python -m benches.quality.depth train` trains a block that says whether a way leads from one node of a directed graph
to another (difficulty: hops of the way). `python -m benches.quality.depth [--draws N]` quantizes it by rounding, by
GPTQ from one loop and from all, and by loopq's default, counts right answers at each difficulty and number of loops,
and writes benches/record, the table of docs/zoo.md and its picture. `show` draws both from the newest record.

The task and the shape of the block follow "Thinking Deeper, Not Longer" (arXiv 2603.21676), graph reachability. The
card, benches/zoo/reach/README.md, says what differs.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import subprocess
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import loopq
from benches.pages import RECORD, ROOT, into, json_lines
from benches.quality.calls import VARIANTS
from benches.quality.peers_table import processor, table
from benches.quality.picture import DARK, LIGHT, Theme, as_svg, newest
from loopq.evaluation.stats import wilson

PAGE, MARK = ROOT / "docs" / "zoo.md", "depth"
WEIGHTS = ROOT / "benches" / "zoo" / "reach" / "model.safetensors"
WORK = ROOT / ".cache" / "zoo" / "reach"
KEPT = ("rounding", "GPTQ, one step", "GPTQ, all steps", "loopq")
#: The narrowest moves most, so that more calibrations and trainings are measured there.
BITS: tuple[Literal[4, 3, 2], ...] = (4, 3, 2)
GROUP = 32

N_LETTERS, MAX_LOOPS = 26, 20
#: Trained on ways of so many hops at most, with a number of loops drawn for each batch, on graphs of so many nodes.
TRAINED_HOPS, TRAINED_LOOPS, TRAINED_NODES = 5, (5, 8), (8, 12)
N_UPDATES, BATCH, RATE = 600, 64, 2e-3
#: Measured difficulties, graphs of each, and the accuracy from which a cell counts as solved.
HOPS, N_GRAPHS, SOLVED = (1, 2, 4, 6, 7, 8, 9, 10), 500, 0.9
#: Seed of the graphs that accuracy is measured on. Trainings and calibrations draw theirs from (this + 1 or 2, seed).
HELD_OUT = 2**40
#: Difficulties of the table's frontier, and that of the picture's lines.
FRONTIER, DRAWN = (6, 8, 9, 10), 9
HUES = {
    "float32": "ink", "rounding": "pink", "GPTQ, one step": "orange", "GPTQ, all steps": "green", "loopq": "blue",
}  # fmt: skip

Batch = dict[str, Any]
Counts = NDArray[np.int64]


class Reach(nn.Module):
    """Whether a way leads from one node of a directed graph to another, by one block that runs `n_loops` times.

    A node attends to itself and to the nodes with an edge to it, so that one loop carries what is known over one edge.
    """

    def __init__(self, width: int = 64, n_heads: int = 4) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.letter, self.role = nn.Embedding(N_LETTERS, width), nn.Embedding(2, width)
        # Rows of loops beyond those of the training stay small.
        self.loop = nn.Parameter(0.02 * torch.randn(MAX_LOOPS, width))
        self.start, self.before, self.between = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(2 * width, width)
        nn.init.constant_(self.gate.bias, -2.0)
        self.head = nn.Sequential(
            nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def block(self, state: Tensor, mask: Tensor, loop: int) -> Tensor:
        """Run one loop on a state (n, nodes, width). The mask (n, nodes, nodes) is added to scores of attention."""
        n, nodes, width = state.shape
        x = state + self.loop[loop]
        query, key, value = (
            self.qkv(self.before(x)).view(n, nodes, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        x = x + self.out(seen.transpose(1, 2).reshape(n, nodes, width))
        x = x + self.down(self.up(self.between(x)).relu())
        share = self.gate(torch.cat([x, state], -1)).sigmoid()
        return share * x + (1 - share) * state

    def forward(
        self, edges: Tensor, letters: Tensor, ends: Tensor, n_loops: int, every: bool = False
    ) -> Tensor:
        """Logits of "there is a way", float32 of shape (n), or (n_loops, n) after each loop.

        Parameters
        ----------
        edges : Tensor, float32, shape (n, nodes, nodes)
            1 where the node of the row sees the node of the column, else 0.
        letters : Tensor, int64, shape (n, nodes)
            Names of the nodes, from 0 to 25.
        ends : Tensor, int64, shape (n, 2)
            Where the way begins and ends.
        n_loops : int
            Runs of the block, 20 at most.
        """
        at = torch.arange(len(ends))[:, None]
        state = self.letter(letters).index_put((at, ends), self.role.weight, accumulate=True)
        state, mask, logits = self.start(state), (edges - 1) * 1e4, []
        for loop in range(n_loops):
            state = self.block(state, mask, loop)
            if every or loop == n_loops - 1:
                logits.append(self.head(state[at, ends].flatten(1))[:, 0])
        return torch.stack(logits) if every else logits[-1]


def graphs(hops: Counts, nodes: int, rng: np.random.Generator) -> tuple[Batch, Tensor]:
    """Arguments of the model for graphs with a way of so many hops, and the answers. In every second graph it is cut.

    Each node has a level, and no edge rises by more than one, so no way is shorter than the planted one. The cut takes
    all edges between two levels, and the rest on both sides stays. The end learns of the start after `hops` loops.
    """
    n, hops, order = len(hops), hops[:, None], np.arange(nodes)[None]
    level = np.where(order <= hops, order, rng.integers(0, hops + 1, (n, nodes)))
    rise = level[:, None, :] - level[:, :, None]
    density = rng.uniform(0.5, 2, (n, 1, 1)) / (nodes - 1)
    edge = (rng.random((n, nodes, nodes)) < density) & (rise <= 1)
    edge |= (order[:, :, None] + 1 == order[:, None, :]) & (order[:, None, :] <= hops[:, :, None])
    reached = np.arange(n) % 2 == 0
    edge &= reached[:, None, None] | (level[:, :, None] != rng.integers(0, hops)[:, :, None]) | (rise != 1)
    edge |= np.eye(nodes, dtype=bool)
    place, at = rng.permuted(np.tile(order, (n, 1)), axis=1), np.arange(n)[:, None]
    seen = np.zeros((n, nodes, nodes), np.float32)
    seen[at[:, :, None], place[:, :, None], place[:, None, :]] = edge.transpose(0, 2, 1)
    letters = rng.permuted(np.tile(np.arange(N_LETTERS), (n, 1)), axis=1)[:, :nodes]
    ends = np.stack([place[:, 0], place[at[:, 0], hops[:, 0]]], 1)
    arguments = {"edges": seen, "letters": letters, "ends": ends}
    return {k: torch.from_numpy(v) for k, v in arguments.items()}, torch.from_numpy(reached)


def drawn(n: int, rng: np.random.Generator) -> tuple[Batch, Tensor]:
    """Graphs as in the training."""
    nodes = int(rng.integers(TRAINED_NODES[0], TRAINED_NODES[1] + 1))
    return graphs(rng.integers(1, TRAINED_HOPS + 1, n), nodes, rng)


def train(seed: int, n_updates: int = N_UPDATES, work: Path = WORK, save_every: int = 200) -> Reach:
    """Train on the answer after the last loop alone. A stopped training resumes from its last checkpoint in `work`."""
    torch.manual_seed(seed)
    model, first, seconds = Reach(), 0, 0.0
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    state = work / f"seed{seed}.pt"
    if state.exists():
        held = torch.load(state, weights_only=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        first, seconds = held["update"], held["seconds"]
    began = time.process_time() - seconds
    for update in range(first, n_updates):
        rng = np.random.default_rng([HELD_OUT + 1, seed, update])
        batch, answers = drawn(BATCH, rng)
        n_loops = int(rng.integers(TRAINED_LOOPS[0], TRAINED_LOOPS[1] + 1))
        loss = F.binary_cross_entropy_with_logits(model(**batch, n_loops=n_loops), answers.float())
        warm, fall = min(1.0, (update + 1) / 100), 0.5 + 0.5 * math.cos(math.pi * update / n_updates)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * fall
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (update + 1) % save_every == 0:
            seconds = time.process_time() - began
            work.mkdir(parents=True, exist_ok=True)
            held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(held | {"update": update + 1, "seconds": seconds}, part := state.with_suffix(".part"))
            part.replace(state)
            print(
                f"seed {seed}: {update + 1} updates, loss {loss.item():.4f}, {seconds:.0f} CPU s", flush=True
            )
    return model.eval()


def calibration(draw: int, n_batches: int = 128, n_loops: int = TRAINED_LOOPS[1]) -> list[Batch]:
    """Batches of four graphs as in the training, all with the most loops of the training."""
    rng = np.random.default_rng([HELD_OUT + 2, draw])
    return [{**drawn(4, rng)[0], "n_loops": n_loops} for _ in range(n_batches)]


def answered(model: nn.Module) -> NDArray[np.bool_]:
    """Which answers are right, of shape (hops, loops, graphs). The same graphs serve every number of loops."""
    found = np.zeros((len(HOPS), MAX_LOOPS, N_GRAPHS), bool)
    for rows, hops in zip(found, HOPS, strict=True):
        rng = np.random.default_rng([HELD_OUT, hops])
        for first in range(0, N_GRAPHS, 100):
            nodes = int(rng.integers(max(8, hops + 2), max(12, hops + 6) + 1))
            batch, answers = graphs(np.full(min(100, N_GRAPHS - first), hops), nodes, rng)
            with torch.no_grad():
                logits = model(**batch, n_loops=MAX_LOOPS, every=True)
            rows[:, first : first + 100] = ((logits > 0) == answers).numpy()
    return found


def run(seed: int, draws: dict[Literal[4, 3, 2], int]) -> list[dict[str, Any]]:
    """Rows of a trained model: right answers by hops and loops, and what float32 has right alone, or not."""
    model = load(seed)
    full = answered(model)
    rows: list[dict[str, Any]] = [
        {"seed": seed, "bits": 32, "variant": "float32", "draw": 0, "right": full.sum(2).tolist()}
    ]
    for width, n_draws in draws.items():
        for variant in KEPT:
            # Rounding reads no calibration.
            for draw in range(n_draws if variant != "rounding" else 1):
                with warnings.catch_warnings():
                    # The vector of each loop, which is added.
                    warnings.filterwarnings("ignore", "not quantized: loop")
                    made = loopq.quantize(
                        copy.deepcopy(model), calibration(draw), bits=width, group_size=GROUP, threads=1,
                        **VARIANTS[variant],
                    )  # fmt: skip
                here = answered(loopq.load(made, copy.deepcopy(model)).model)
                row = {"seed": seed, "bits": width, "variant": variant, "draw": draw}
                counts = {"right": here, "lost": full & ~here, "won": here & ~full}
                rows.append(row | {k: v.sum(2).tolist() for k, v in counts.items()})
                print(seed, width, variant, draw, f"{here.mean():.4f}", flush=True)
    return rows


def needed(right: Sequence[int], n_graphs: int) -> int | None:
    """The smallest number of loops with which the solved share of graphs is answered, if there is one."""
    return next((loops for loops, n in enumerate(right, 1) if n >= SOLVED * n_graphs), None)


def spread(values: Sequence[int | None]) -> str:
    """The range of numbers of loops over calibrations. None is more than the most."""
    shown = [
        f"> {MAX_LOOPS}" if v is None else str(v) for v in sorted(values, key=lambda v: v or MAX_LOOPS + 1)
    ]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"


def results(data: dict[str, Any]) -> str:
    """A line for each training, width and variant: the frontier, a cell on it, and changes from float32.

    The cell is the one where float32 is nearest to the middle between a guess and certainty.
    """
    hops, n, lines = data["hops"], data["n_graphs"], []
    kinds: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        kinds.setdefault((row["seed"], row["bits"], row["variant"]), []).append(row)
    for (seed, bits, variant), rows in kinds.items():
        full = np.array(kinds[seed, 32, "float32"][0]["right"])
        at, loops = np.unravel_index(np.abs(full / n - 0.75).argmin(), full.shape)
        line: dict[str, Any] = {"seed": seed, "weights": variant if bits == 32 else f"{bits} bits: {variant}"}
        for h in FRONTIER:
            line[f"at {h}"] = spread([needed(row["right"][hops.index(h)], n) for row in rows])
        share = wilson(rows[0]["right"][at][loops], n)
        line["cell"] = f"{share.estimate:.2f} ({share.low:.2f}-{share.high:.2f})"
        if bits == 32:
            line["cell"] += f" at {hops[at]} hops, {loops + 1} loops"
        for key in ("lost", "won"):
            if key in rows[0]:
                line[key] = f"{100 * np.mean([row[key] for row in rows]) / n:.2f} %"
        lines.append(line)
    columns = [("seed", "training", ""), ("weights", "weights", "")]
    columns += [(f"at {h}", f"loops at {h} hops", "") for h in FRONTIER]
    columns += [("cell", "right answers in a cell (95 %)", ""), ("lost", "lost", ""), ("won", "won", "")]
    return table(lines, columns)


def pages(data: dict[str, Any]) -> dict[tuple[Path, str], str]:
    """The table by its page and its mark."""
    return {(PAGE, MARK): results(data)}


def draw(figure: Figure, data: dict[str, Any], theme: Theme) -> None:
    """Right answers of float32 by hops and loops, and of the narrowest weights by loops for each training."""
    hops, n = data["hops"], data["n_graphs"]
    seeds = list(dict.fromkeys(row["seed"] for row in data["rows"]))
    grid, *lines = figure.subplots(1, 1 + len(seeds), width_ratios=(1.2, *(1,) * len(seeds)))
    colours = LinearSegmentedColormap.from_list("share", [theme.page, theme.colour("sky")])
    full = np.array(data["rows"][0]["right"]) / n
    grid.imshow(full, cmap=colours, vmin=0.5, vmax=1.0, aspect="auto", origin="lower")
    grid.set_xticks([0, 4, 9, 14, 19], [1, 5, 10, 15, 20])
    grid.set_yticks(range(len(hops)), hops)
    grid.set_ylabel("hops")
    grid.set_title("float32", loc="left")
    for axes, seed in zip(lines, seeds, strict=True):
        for row in (r for r in data["rows"] if r["seed"] == seed and r["bits"] in (32, BITS[-1])):
            under = row["variant"] == "float32"
            axes.plot(
                range(1, MAX_LOOPS + 1), np.array(row["right"][hops.index(DRAWN)]) / n, zorder=1 if under else 2,
                color=theme.colour(HUES[row["variant"]]), linewidth=5 if under else 1.2, alpha=0.3 if under else 1,
                label=row["variant"] if row["draw"] == 0 else None,
            )  # fmt: skip
        axes.set_xlim(8, MAX_LOOPS)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.set_ylim(0.47, 1.02)
        axes.set_title(f"{DRAWN} hops, {BITS[-1]} bits", loc="left")
        axes.set_xlabel(f"loops, training {seed}")
        axes.grid(alpha=0.18)
    grid.set_xlabel(f"loops, training {seeds[0]}")
    lines[0].set_ylabel("right answers")
    lines[0].legend(frameon=False, loc="upper left", fontsize=8)


def stored(seed: int) -> Path:
    """The weights of a training: the repository has those of seed 0."""
    return WEIGHTS if seed == 0 else WORK / f"seed{seed}.safetensors"


def load(seed: int) -> Reach:
    """A trained model, in float32."""
    if not (path := stored(seed)).exists():
        raise SystemExit(
            f"{path}: not trained here; run python -m benches.quality.depth train --seeds {seed}"
        )
    model = Reach()
    model.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["train", "show"], help="default: quantize and measure")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="trainings (default %(default)s)"
    )
    parser.add_argument(
        "--draws", type=int, default=3, help="sets of calibration graphs at 2 bits (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="default: a new record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if args.what == "show":
        show(newest("depth", RECORD))
        return
    if args.what == "train":
        for seed in args.seeds:
            state = {k: v.half().contiguous() for k, v in train(seed).state_dict().items()}
            stored(seed).parent.mkdir(parents=True, exist_ok=True)
            save_file(state, stored(seed))
        return
    first, *others = args.seeds
    rows = run(first, dict.fromkeys(BITS, 1) | {BITS[-1]: args.draws})
    rows += [row for seed in others for row in run(seed, {BITS[-1]: 1})]
    names = " ".join(map(str, args.seeds))
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], text=True)
    data = {
        "command": f"python -m benches.quality.depth --seeds {names} --draws {args.draws}", "cpu": processor(),
        "commit": commit.strip(), "loopq": loopq.__version__, "group": GROUP, "hops": HOPS, "n_graphs": N_GRAPHS,
        "rows": rows,
    }  # fmt: skip
    out = args.out or RECORD / f"depth-{datetime.date.today()}.json"
    out.write_text(json_lines(data) + "\n", "utf-8")
    if args.out is None:
        show(out)


def show(record: Path) -> None:
    """Write the page's table and both pictures of a record."""
    data = json.loads(record.read_text("utf-8"))
    for (page, mark), text in pages(data).items():
        into(page, mark, text)
    for name, text in pictures(data).items():
        (ROOT / "docs" / "_static" / name).write_text(text, "utf-8")


def pictures(data: dict[str, Any]) -> dict[str, str]:
    """Each picture by its file's name."""
    return {
        f"depth-{theme.name}.svg": as_svg(partial(draw, data=data, theme=theme), theme, height=3.3)
        for theme in (LIGHT, DARK)
    }


if __name__ == "__main__":
    main()
