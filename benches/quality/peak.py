"""Peak memory of a part of a process."""

from __future__ import annotations

import ctypes
from pathlib import Path

PROCESS = Path("/proc/self")


class Peak:
    """Most resident memory since `restart`, above what was resident when this was made (Linux only)."""

    def __init__(self) -> None:
        self.restart()
        self._before = _resident("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far; what has been freed goes back to the system first."""
        ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5")  # proc(5): resets the peak of the resident set

    def mib(self) -> float:
        """The peak, in MiB."""
        return _resident("VmHWM") - self._before


def _resident(name: str) -> float:
    """A size in the kernel's status of this process, in MiB."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
