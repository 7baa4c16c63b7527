"""How work is carried out: what changes its speed, its memory and its report, and no result but by the seed."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

from loopq.settings.declare import Settings, setting
from loopq.terminal.progress import Progress, Silent

#: Seconds between two looks at what other processes have done.
POLL = 0.5


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
    """

    seed: int = setting(0, at_least=0)
    batch_size: int = setting(8, at_least=1)
    threads: int = setting(0, at_least=0, at_most=1024)
    memory: int | None = setting(None, at_least=1, parse=parse_bytes, metavar="SIZE")
    work: Path | None = setting(None, option=False)
    progress: Progress = field(default_factory=Silent, metadata={"option": False})

    def folder(self, name: str) -> Path | None:
        """A folder within the work folder, or None where nothing is saved."""
        return None if self.work is None else self.work / name
