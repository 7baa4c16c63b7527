"""Settings of execution: they change speed, memory and progress reports. Only the seed changes results."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopq.errors import ConfigError
from loopq.settings.declare import Settings, setting
from loopq.terminal.progress import Progress, Silent

#: Share of the free memory that a run plans with. Estimates are not exact.
PLANNED = 0.9
#: Seconds between two checks of other processes' progress.
POLL = 0.5


def parse_bytes(text: str) -> int:
    """Read a number of bytes with a unit, such as 8G or 512M. Units are powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r}: give bytes with a unit, as in 8G or 512M")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory available without swapping, within the limits of containers (cgroup v2); None if it is not reported."""
    try:
        lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    cgroup = Path("sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        cgroup = Path(f"{cgroup}{(root / 'proc/self/cgroup').read_text('ascii').rpartition('::')[2].strip()}")
    for group in (root / place for place in (cgroup, *cgroup.parents)):
        # Groups without a limit have no such file, or "max" in it.
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((group / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
            free.append(max(0, limit - used + int(stat["file"])))
    return min(free, default=None)


def device_bytes(device: Any) -> int | None:
    """Free memory of a CUDA device (torch.device); None for other devices."""
    if device.type != "cuda":
        return None
    import torch  # lazy: loopq imports without torch

    return int(torch.cuda.mem_get_info(device)[0])


def resident_bytes(mapped: bool = False) -> int:
    """Present memory of this process, or its part in mapped files; 0 if the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1 + mapped]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def at_most(more: int) -> str:
    """Say what the process will hold: what it has now, and `more` bytes."""
    return f"about {(resident_bytes() + more) / 2**20:.0f} MiB at most"


def require_float32() -> None:
    """Reject a process that rounds the inputs of float32 products to tf32 or bfloat16.

    Raises
    ------
    ConfigError
        The setting is one of the whole process, so it is not changed here.
    """
    import torch  # lazy: loopq imports without torch

    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise ConfigError(
            f"torch.set_float32_matmul_precision is {precision!r} in this process, which rounds the inputs of float32 "
            "products: set 'highest' before this call"
        )


@dataclass(frozen=True)
class Execution(Settings):
    """How a run is carried out.

    Parameters
    ----------
    seed : int
        Seed of the initial states, for models that draw them.
    batch_size : int
        Prompts that run together.
    threads : int
        Threads; 0 takes all cores. Their number changes no result.
    memory : int, optional
        Limit for Hessians, metrics and solves together, besides the model, as in 8G. If needed, the calibration set is
        run several times, with the same result. Where the model runs, the default is the free memory, less a tenth.
    work : Path, optional
        Folder for saved progress. A killed run resumes from it.
    progress : Progress
        Receives prompts, layers and updates.
    """

    seed: int = setting(0, at_least=0)
    batch_size: int = setting(8, at_least=1)
    threads: int = setting(0, at_least=0, at_most=1024)
    memory: int | None = setting(None, at_least=1, parse=parse_bytes, metavar="SIZE")
    work: Path | None = setting(None, option=False)
    progress: Progress = field(default_factory=Silent, metadata={"option": False})

    def folder(self, name: str) -> Path | None:
        """Return a folder within the work folder, or None if nothing is saved."""
        return None if self.work is None else self.work / name
