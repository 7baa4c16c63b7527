"""Ranks of torchrun: processes that wait for each other once, and then share batches of a calibration set."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta

from loopq.calibrate.collect import finish_dump, release
from loopq.calibrate.dump import Manifest
from loopq.calibrate.hessian_dump import HessianDump
from loopq.errors import ConfigError, LoopqError, require
from loopq.settings.execution import POLL
from loopq.storage.journal import Journal

#: Seconds that a process waits for the last messages of others.
PATIENCE = 10.0


@dataclass(frozen=True)
class Ranks:
    """One of the processes that torchrun started for one command.

    Parameters
    ----------
    rank, world : int
        Index of this process, from 0, and number of processes.
    timeout : float
        Maximum seconds of waiting for each other before the work begins.
    """

    rank: int
    world: int
    timeout: float = 600.0

    @classmethod
    def of_environment(cls) -> Ranks | None:
        """Read torchrun's variables; None for a single process.

        Raises
        ------
        ConfigError
            There are several processes, but this one has no rank.
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
        """Wait until all processes have arrived with the same work.

        Raises
        ------
        LoopqError
            A process is late or has other work. The message says which.
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
                "the prompts, the options and the kind of processor must be the same everywhere"
            )

    def _ask(self, work: str) -> tuple[list[int], list[int]]:
        """Return missing ranks, and ranks with other work."""
        distributed, limit = require("torch.distributed", "torch"), timedelta(seconds=self.timeout)
        host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
        # torchrun keeps its own store, with entries of earlier attempts.
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        place = f"loopq/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self.world}"
        missing, until = list(range(self.world)), time.monotonic() + self.timeout
        try:
            store = distributed.TCPStore(host, port, None, serves, limit, wait_for_workers=False)
            store.set(f"{place}/{self.rank}", work)
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
                time.sleep(0.05)
            there = [rank for rank in range(self.world) if rank not in missing]
            others = [rank for rank in there if store.get(f"{place}/{rank}").decode() != work]
            # The process with the store stays until all others are done with it.
            store.add(f"{place}/through", 1)
            until = time.monotonic() + PATIENCE
            while serves and store.add(f"{place}/through", 0) < len(there) and time.monotonic() < until:
                time.sleep(0.05)
        except RuntimeError as cause:
            # Torch raises this if nobody answers.
            raise LoopqError(
                f"rank {self.rank} of {self.world}: rank 0 at {host}:{port} did not come within {self.timeout:.0f} s, "
                "or is gone; what is saved stays: start all again, in any number"
            ) from cause
        return missing, others


def collect_hessians(ranks: Ranks, dump: HessianDump) -> Manifest:
    """Write a Hessian dump as one of several ranks.

    Raises
    ------
    LoopqError
        A rank is late or has other work, or a part failed. The message names the rank.
    """
    out, late = dump.out, ranks.rank == 0 and dump.begin()
    ranks.meet(dump.key)
    if late:
        manifest = finish_dump(out)
        release(out)
        return manifest
    dump.tell()
    try:
        work = out / "work"
        work.mkdir(exist_ok=True)
        with Journal(work, "").claims() as claims:
            for number, input_groups in enumerate(dump.passes):
                share = (ranks.rank, ranks.world)
                dump.sums.share_pass(input_groups, work / str(number), share, lambda: dump.is_there)
            while not dump.is_there:
                if claims.take(""):
                    manifest = dump.write()
                    release(out)
                    return manifest
                time.sleep(POLL)
    except LoopqError as error:
        # The process that combines the dump removes the work folder.
        if not dump.is_there:
            raise type(error)(f"rank {ranks.rank} of {ranks.world}: {error}") from error
    # A slow process may have recreated it.
    shutil.rmtree(out / "work", ignore_errors=True)
    return Manifest.read(out)
