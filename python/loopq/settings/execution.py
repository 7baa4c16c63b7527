"""How work is carried out: what changes its speed, its memory and its report, and no result but by the seed."""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from loopq.errors import ConfigError, LoopqError
from loopq.lazy import require
from loopq.settings.declare import Settings, setting
from loopq.terminal.progress import Progress, Silent

#: Seconds between two looks at what other processes have done, and those that one waits for their last word.
POLL, PATIENCE = 0.5, 10.0


def parse_bytes(text: str) -> int:
    """Read a number of bytes with a unit, as in 8G or 512M; units are powers of 1024."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: give bytes with a unit, as in 8G or 512M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


@dataclass(frozen=True)
class Ranks:
    """One of the processes that torchrun started for one command.

    Parameters
    ----------
    rank, world : int
        Number of this process, from 0, and of all.
    timeout : float
        Seconds that they wait for each other before the work begins.
    """

    rank: int
    world: int
    timeout: float = 600.0

    @classmethod
    def of_environment(cls) -> Ranks | None:
        """Read what torchrun says; None for a process that is alone.

        Raises
        ------
        ConfigError
            There are others, and no number that tells this one from them.
        """
        world = os.environ.get("WORLD_SIZE", "1")
        if world == "1":
            return None
        rank = os.environ.get("RANK", "")
        if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
            raise ConfigError(
                f"WORLD_SIZE={world} and RANK={rank} are set: start the processes with torchrun, or unset both"
            )
        return cls(int(rank), int(world))

    def meet(self, work: str) -> None:
        """Wait until all processes are there with the same work.

        Raises
        ------
        LoopqError
            One did not come in time, or has other work; the message says which.
        """
        missing, others = self._ask(work)
        if missing:
            raise LoopqError(
                f"rank {', '.join(map(str, missing))} of {self.world} did not come within {self.timeout:.0f} s; what "
                "is saved stays: start all again, in any number"
            )
        if others:
            raise LoopqError(
                f"rank {', '.join(map(str, others))} of {self.world} has other work than rank {self.rank}: the model, "
                "the prompts and the options must be the same everywhere"
            )

    def _ask(self, work: str) -> tuple[list[int], list[int]]:
        """Ranks that are missing, and those with other work."""
        distributed, limit = require("torch.distributed", "torch"), timedelta(seconds=self.timeout)
        host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
        # torchrun keeps a store of its own, with what an earlier attempt left in it.
        own = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        place = f"loopq/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self.world}"
        missing, until = list(range(self.world)), time.monotonic() + self.timeout
        try:
            store = distributed.TCPStore(host, port, None, own, limit, wait_for_workers=False)
            store.set(f"{place}/{self.rank}", work)
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
                time.sleep(0.05)
            there = [rank for rank in range(self.world) if rank not in missing]
            others = [rank for rank in there if store.get(f"{place}/{rank}").decode() != work]
            # Who has the store stays until nobody asks it any more.
            store.add(f"{place}/through", 1)
            until = time.monotonic() + PATIENCE
            while own and store.add(f"{place}/through", 0) < len(there) and time.monotonic() < until:
                time.sleep(0.05)
        except RuntimeError as cause:
            # What torch says when nobody answers.
            raise LoopqError(
                f"rank {self.rank} of {self.world}: rank 0 at {host}:{port} did not come within {self.timeout:.0f} s, "
                "or is gone; what is saved stays: start all again, in any number"
            ) from cause
        return missing, others


@dataclass(frozen=True)
class Execution(Settings):
    """How a run is carried out.

    Parameters
    ----------
    seed : int
        Seed of the initial states, where a model draws them.
    batch_size : int
        Prompts that run together.
    threads : int
        Threads; 0: all cores. Their number changes no result.
    memory : int, optional
        Memory that Hessians, metrics and solves may take together besides the model, as in 8G. The calibration set
        is run several times if need be.
    work : Path, optional
        Folder where progress is saved, so that a run that was killed can be resumed.
    progress : Progress
        Told of prompts, layers and updates.
    ranks : Ranks, optional
        This process among those that torchrun started.
    """

    seed: int = setting(0, at_least=0)
    batch_size: int = setting(8, at_least=1)
    threads: int = setting(0, at_least=0, at_most=1024)
    memory: int | None = setting(None, at_least=1, parse=parse_bytes, metavar="SIZE")
    work: Path | None = setting(None, option=False)
    progress: Progress = field(default_factory=Silent, metadata={"option": False})
    ranks: Ranks | None = field(default=None, metadata={"option": False})

    def folder(self, name: str) -> Path | None:
        """A folder within the work folder, or None where nothing is saved."""
        return None if self.work is None else self.work / name
