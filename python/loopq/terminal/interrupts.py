"""Ctrl-C: record it when it comes, and end the program soon after, even in the middle of work."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

#: Exit code of a program that was interrupted.
INTERRUPTED = 130


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End the program. Handles signals while no command runs."""
    _end("loopq: interrupted")


def _end(line: str) -> NoReturn:
    # Bypasses all buffers and locks, because the program is going down.
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))
    os._exit(INTERRUPTED)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


class Interrupts:
    """Ctrl-C while a command runs: a KeyboardInterrupt that is also recorded.

    Libraries that are being imported turn it into other errors.

    Parameters
    ----------
    patience : float or None
        Seconds until the process ends if the interrupt has not arrived, since a long library call does not react to
        signals. This is as safe as a kill (SECURITY.md). None waits indefinitely.
    line : callable
        What is printed then.
    """

    def __init__(self, patience: float | None, line: Callable[[], str]) -> None:
        self.any = False
        self._line = line
        self._hurried = patience is not None
        # Only the main thread receives signals. In other threads the owner of the main thread decides.
        self._main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGINT, self._note) if self._main else None
        self._told, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._wakeup: socket.socket | None = None
        if self._main and patience is not None:
            # Every signal's number is written here when it comes, not when Python handles it.
            watched, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(watched, patience), daemon=True).start()

    def _note(self, number: int, frame: FrameType | None) -> NoReturn:
        self.any = True
        # C++ code of torch that is being imported aborts the process on an exception.
        if self._hurried and _importing(frame):
            _end(self._line())
        raise KeyboardInterrupt

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        # A KeyboardInterrupt in a destructor or callback ends here. Python would print the place and continue.
        if not isinstance(what.exc_value, KeyboardInterrupt):
            self._told(what)

    def _watch(self, watched: socket.socket, patience: float) -> None:
        with watched:
            while number := watched.recv(1):
                if number[0] == signal.SIGINT:
                    watched.settimeout(patience)
                    try:
                        again = watched.recv(1)
                    except TimeoutError:
                        again = number
                    # The other end is closed when the command has ended. A second Ctrl-C does not wait.
                    if again:
                        _end(self._line())
                    return

    def end(self) -> None:
        """Restore the previous handlers."""
        sys.unraisablehook = self._told
        if self._main:
            signal.signal(signal.SIGINT, self._before)
        if self._wakeup:
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
