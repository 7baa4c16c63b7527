"""Progress of long work, shown as one line on standard error that is updated in place."""

from __future__ import annotations

import sys
import time
import warnings
from types import TracebackType
from typing import Protocol, TextIO

from loopq.terminal.text import visible


class Progress(Protocol):
    """Receiver of the progress of long work."""

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a stage of `total` units."""

    def advance(self, n: int = 1) -> None:
        """Report that `n` more units are done."""

    def stop(self) -> None:
        """End the stage."""

    def note(self, text: str) -> None:
        """Print a line that is not overwritten."""

    def warn(self, text: str) -> None:
        """Report a deviation from the defaults."""


class Silent:
    """Progress that prints nothing, the library's default. Deviations from defaults become Python warnings."""

    def start(self, label: str, total: int, unit: str) -> None:
        """Ignore the stage."""

    def advance(self, n: int = 1) -> None:
        """Ignore the units."""

    def stop(self) -> None:
        """Ignore the end."""

    def note(self, text: str) -> None:
        """Ignore the line."""

    def warn(self, text: str) -> None:
        """Warn through Python's warnings."""
        warnings.warn(text, stacklevel=3)


class Line:
    """Progress as text: a bar on a terminal. In a log, a line once a minute and at the end of each stage."""

    def __init__(self, stream: TextIO | None = None, every: float = 0.1, log_every: float = 60.0) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._every = every if self._live else log_every
        self._label = ""
        self._unit = ""
        self._total = self._done = 0
        self._began = self._shown = 0.0

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a stage and draw its bar."""
        self._label, self._total, self._unit, self._done = label, total, unit, 0
        self._began = self._shown = time.monotonic()
        if self._live:
            self._draw()

    def advance(self, n: int = 1) -> None:
        """Count units. Update the bar at most ten times a second, or once a minute in a log."""
        self._done += n
        if time.monotonic() - self._shown > self._every and self._done < self._total:
            self._draw()
            if not self._live:
                self._stream.write("\n")

    def stop(self) -> None:
        """Draw the finished stage and start a new line."""
        self._draw()
        self._stream.write("\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Write a line that is not overwritten."""
        self._stream.write(("\r\x1b[K" if self._live else "") + visible(text) + "\n")
        self._stream.flush()

    def warn(self, text: str) -> None:
        """Write the line as a note."""
        self.note(text)

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._stream.write("\n")

    def _draw(self) -> None:
        self._shown = time.monotonic()
        elapsed = self._shown - self._began
        share = self._done / self._total if self._total else 1.0
        left = elapsed / share - elapsed if 0 < share < 1 else 0.0
        filled = round(24 * share)
        bar = "#" * filled + "." * (24 - filled)
        end = f"{elapsed:.0f} s, {left:.0f} s left" if share < 1 else f"{elapsed:.1f} s"
        text = f"{self._label:<10} [{bar}] {self._done}/{self._total} {self._unit}, {end}"
        self._stream.write(("\r\x1b[K" if self._live else "") + text)
        self._stream.flush()
