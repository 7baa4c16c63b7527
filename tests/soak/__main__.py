"""Eight campaigns: `python -m tests.soak [NAME ...]`, or `make soak`. One table shows what was tried and what failed.

A name is a campaign (`kills`) or a part of one (`ranks`). `--minutes` bounds the whole run: each part gets its share.
A failure ends the run with code 1. Models and files are small, and lie in memory where the system has such folders.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from benches.zoo.store import save_model
from loopq.terminal.table import render

from ..conftest import tiny_model
from . import arrays, bits, changes, failures, files, inputs, nodes, options, readers, runs, together
from .counts import Counts


class Soak:
    """Data shared by the parts: a folder, the commands that ran once, and the end time of the present
    part."""

    def __init__(self, base: Path) -> None:
        self.base, self.until = base, math.inf
        self._benches: dict[str, runs.Bench] = {}

    def bench(self, name: str = "") -> runs.Bench:
        """All commands of `runs`, or one of those that several processes divide."""
        if name not in self._benches:
            commands = {name: together.COMMANDS[name]} if name else runs.COMMANDS
            self._benches[name] = runs.Bench(self.place(f"bench-{name}"), commands)
        self._benches[name].until = self.until
        return self._benches[name]

    def place(self, name: str) -> Path:
        """A new folder."""
        folder = self.base / name
        folder.mkdir()
        return folder

    def model(self, name: str) -> Path:
        """The tiny model in a new folder."""
        save_model(tiny_model(), folder := self.place(name) / "model")
        return folder


class Part(NamedTuple):
    """A part of a campaign: the number and kind of its cases, its share of a limited time, and its
    function."""

    campaign: str
    n: int
    what: str
    share: int
    run: Callable[[Soak, int, random.Random], Counts]


def _mutated(soak: Soak, n: int, rng: random.Random) -> Counts:
    first = rng.randrange(10**9)
    return files.campaign([files.checkpoints, files.dumps], range(first, first + n), soak.until)


PARTS = {
    "kills": Part("kills", 1000, "kills, over every command", 9, lambda s, n, r: runs.kills(s.bench(), n, r)),
    "interrupts": Part(
        "kills", 100, "Ctrl-C at a random moment of a program", 4, lambda s, n, r: runs.interrupts(s.bench(), n, r)
    ),
    "ranks": Part(
        "kills", 20, "kills of ranks that collect together", 3, lambda s, n, r: together.ranks(s.bench("ranks"), n, r)
    ),
    "workers": Part(
        "kills", 20, "kills of workers that solve together", 3,
        lambda s, n, r: together.workers(s.bench("workers"), n, r),
    ),
    "writers": Part("writers", 100, "pairs of runs with one output", 6, lambda s, n, r: runs.writers(s.bench(), n, r)),
    "holders": Part(
        "writers", 100, "killed runs whose forked child lives on", 3, lambda s, n, r: together.holders(s.bench(), n, r)
    ),
    "sealed": Part("hostile files", 10_000, "mutated folders, paths that lead out, links and pipes", 3, _mutated),
    "readers": Part(
        "hostile files", 10_000, "changes of the files of each reader", 8,
        lambda s, n, r: readers.readers(s.place("readers"), n, r, s.until),
    ),
    "flips": Part(
        "flips", 1, "one bit of every N-th byte of a checkpoint and of dumps", 4,
        lambda s, n, r: bits.flips(s.place("flips"), n, r, s.until),
    ),
    "limits": Part(
        "limits", 90, "runs with little disk, memory or few open files", 5, lambda s, n, r: runs.limits(s.bench(), n, r)
    ),
    "models": Part(
        "models", 300, "models with a changed config or header", 3,
        lambda s, n, r: inputs.models(s.model("changed"), n, r, s.until),
    ),
    "lines": Part(
        "models", 600, "command lines", 3, lambda s, n, r: inputs.command_lines(s.model("lines"), n, r, s.until)
    ),
    "arrays": Part(
        "models", 10_000, "calls of the core with hostile arrays", 3, lambda s, n, r: arrays.calls(n, r, s.until)
    ),
    "options": Part(
        "models", 600, "hostile options, prompts and files of `run`", 4,
        lambda s, n, r: options.options(s.place("options"), n, r, s.until),
    ),
    "changes": Part(
        "kills", 200, "inputs that change between a kill and the rerun", 4,
        lambda s, n, r: changes.changes(s.place("changes"), n, r, s.until),
    ),
    "nodes": Part(
        "outputs", 320, "inputs, devices, pipes and links in the place of outputs", 3,
        lambda s, n, r: nodes.nodes(s.place("nodes"), s.model("outputs"), n, r, s.until),
    ),
    "records": Part(
        "limits", 40, "one long record under a bound of memory", 2,
        lambda s, n, r: options.records(s.place("records"), n, r, s.until),
    ),
    "failpoints": Part(
        "failures", 2000, "an allocation of the core or a call on a file that fails", 4,
        lambda s, n, r: failures.failures(s.place("failpoints"), n, r, s.until),
    ),
}  # fmt: skip


def run(names: list[str], sizes: dict[str, int], seed: int, minutes: float = math.inf) -> dict[str, Counts]:
    """Run parts in a folder of their own; nothing has to outlast a power cut there."""
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    end, results = time.monotonic() + 60 * minutes, {}
    with tempfile.TemporaryDirectory(dir=memory) as folder, mock.patch("os.fsync"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        soak = Soak(Path(folder))
        for number, name in enumerate(names):
            shares = [PARTS[other].share for other in names[number:]]
            began = time.monotonic()
            soak.until = began + (end - began) * shares[0] / sum(shares)
            results[name] = PARTS[name].run(soak, sizes[name], random.Random(f"{seed} {name}"))
            print(
                f"{name}: {time.monotonic() - began:.0f} s, {results[name].said()}",
                file=sys.stderr,
                flush=True,
            )
    return results


def main() -> int:
    """Run what is named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    campaigns = {
        name: [p for p in PARTS if PARTS[p].campaign == name]
        for name in dict.fromkeys(p.campaign for p in PARTS.values())
    }
    choices = {
        **{p: [p] for p in PARTS},
        **{name.replace(" ", "-"): parts for name, parts in campaigns.items()},
    }
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(choices)} (default all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end after so long, with what there is"
    )
    for name, part in PARTS.items():
        parser.add_argument(
            f"--{name}", type=int, default=part.n, metavar="N", help=f"{part.what} (default {part.n})"
        )
    args = parser.parse_args()
    if wrong := set(args.names) - set(choices):
        parser.error(f"no campaign: {', '.join(sorted(wrong))}")
    names = list(dict.fromkeys(part for name in args.names or PARTS for part in choices[name]))
    results = run(names, vars(args), args.seed, args.minutes)
    rows = [
        (PARTS[name].campaign, PARTS[name].what, str(c.n_tried), str(len(c.failures)), c.said())
        for name, c in results.items()
    ]
    print(render(("campaign", "of what", "tried", "failed", "outcomes"), rows))
    failures = [f"{name}: {line}" for name, c in results.items() for line in c.failures]
    # A part that had no time for a case has shown nothing.
    failures += [f"{name}: no case was tried" for name, c in results.items() if not c.n_tried]
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
