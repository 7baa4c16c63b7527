"""The campaigns: `python -m tests.soak [NAME ...]`, or `make soak`. Each prints its counts; a failure ends with code 1.

SOAK_MINUTES ends the campaigns of runs and of files earlier, with the counts that there are.
Everything runs on a tiny model and on small made files, in memory where there is a file system in memory.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from benches.zoo.store import save_model

from ..conftest import tiny_model
from . import bits, files, inputs, readers, runs, together

SIZES = {
    "kills": (1000, "kills, over every command"),
    "writers": (100, "pairs of runs with one output"),
    "interrupts": (100, "Ctrl-C at a random moment of a program"),
    "ranks": (20, "kills of ranks that collect together"),
    "workers": (20, "kills of workers that solve together"),
    "disk": (90, "runs on a disk that is full"),
    "files": (10_000, "mutated files, paths that lead out, links and pipes"),
    "readers": (10_000, "changes of files that a user brings"),
    "bits": (1, "one bit of every N-th byte of a checkpoint and of dumps"),
    "lines": (600, "command lines"),
    "models": (300, "models"),
}


def _on_runs(function: Callable[[runs.Bench, int, random.Random], runs.Counts], name: str = ""):
    commands = {name: together.COMMANDS[name]} if name else runs.COMMANDS

    def campaign(base: Path, size: int, rng: random.Random) -> runs.Counts:
        return function(runs.Bench(base, list(commands), _end(), commands), size, rng)

    return campaign


def _end() -> float:
    return time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "inf"))


def _mutated(base: Path, size: int, rng: random.Random) -> files.Counts:
    first = rng.randrange(10**9)
    return files.campaign([files.checkpoints, files.dumps], range(first, first + size), _end())


def _on_model(function: Callable[[Path, int, random.Random], runs.Counts]):
    def campaign(base: Path, size: int, rng: random.Random) -> runs.Counts:
        save_model(tiny_model(), base / "model")
        return function(base / "model", size, rng)

    return campaign


CAMPAIGNS = {
    "kills": _on_runs(runs.kills),
    "writers": _on_runs(runs.writers),
    "interrupts": _on_runs(runs.interrupts),
    "ranks": _on_runs(together.ranks, "ranks"),
    "workers": _on_runs(together.workers, "workers"),
    "disk": _on_runs(runs.full_disk),
    "files": _mutated,
    "readers": lambda base, size, rng: readers.readers(base, size, rng, _end()),
    "bits": bits.flips,
    "lines": _on_model(inputs.command_lines),
    "models": _on_model(inputs.models),
}


def run(name: str, size: int, seed: int) -> runs.Counts | files.Counts:
    """Run one campaign in a folder of its own; nothing has to outlast a power cut there."""
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, mock.patch("os.fsync"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CAMPAIGNS[name](Path(folder), size, random.Random(seed))


def main() -> int:
    """Run the campaigns that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)} (default all)")
    parser.add_argument("--seed", type=int, default=0)
    for name, (default, text) in SIZES.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    args = parser.parse_args()
    failed = False
    for name in args.names or SIZES:
        began = time.monotonic()
        counts = run(name, getattr(args, name), args.seed)
        print(f"{name}: size {getattr(args, name)}, seed {args.seed}, {time.monotonic() - began:.0f} s")
        print("".join(f"  {line}\n" for line in counts.lines()), end="")
        print("".join(f"  FAILED {line}\n" for line in counts.failures), end="", flush=True)
        failed = failed or bool(counts.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
