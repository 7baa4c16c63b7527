"""Ctrl-C: noted when it comes, and the end of the program soon after, whatever it is doing."""

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
    """End the program: a handler of signals for as long as no command runs."""
    _end("loopq: interrupted")


def _end(line: str) -> NoReturn:
    # Past every buffer and lock of a program that is going down.
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))
    os._exit(INTERRUPTED)


class Interrupts:
    """Ctrl-C while a command runs: a KeyboardInterrupt, which is remembered.

    Libraries that are being imported turn it into errors of their own.

    Parameters
    ----------
    patience : float or None
        Seconds after which the process ends even where the interrupt has not arrived: a long call of a library answers
        no signal. That is as safe as a kill is (SECURITY.md). None waits as long as it takes.
    line : callable
        What is printed then.
    """

    def __init__(self, patience: float | None, line: Callable[[], str]) -> None:
        self.any = False
        self._line = line
        # Only the main thread is told of signals; elsewhere whoever has it decides.
        self._main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGINT, self._note) if self._main else None
        self._told, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._wakeup: socket.socket | None = None
        if self._main and patience is not None:
            # Not above: what is imported before there is a handler is time in which Ctrl-C is a traceback.

            # The number of every signal is written here when it comes, not when Python gets round to it.
            watched, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(watched, patience), daemon=True).start()

    def _note(self, number: int, frame: FrameType | None) -> NoReturn:
        self.any = True
        raise KeyboardInterrupt

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        # One that comes in a destructor or a callback goes no further: Python would print where, and carry on.
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
                    # The other end is closed where the command has ended. A second Ctrl-C does not wait.
                    if again:
                        _end(self._line())
                    return

    def end(self) -> None:
        """Put back what was there."""
        sys.unraisablehook = self._told
        if self._main:
            signal.signal(signal.SIGINT, self._before)
        if self._wakeup:
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
