"""Several pieces of work in turns: each piece runs until it gives its turn to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

#: Maximum seconds until a stopped thread ends.
_PATIENCE = 60.0


class _Stopped(Exception):
    """Another piece failed, so this one is no longer needed."""


class Turns:
    """Threads that run one at a time, in a fixed order.

    Pieces that need the same weights then need them together. Each piece waits before it uses them (`give`). When all
    pieces have arrived, the weights are read once.
    """

    def __init__(self) -> None:
        self._left: list[int] = []
        self._now, self._changed = 0, threading.Condition()
        self._numbers: dict[int, int] = {}
        self._error: BaseException | None = None

    def run(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Run all pieces to their end, the first one first. The first error stops all and is raised."""
        self._left = list(range(len(pieces)))
        threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in enumerate(pieces)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as stopped:
            self._fail(stopped)
            for thread in threads:
                thread.join(_PATIENCE)
            raise
        if self._error is not None:
            raise self._error

    def give(self) -> None:
        """Let all others run until they give their turn. Threads of other work have no turn."""
        number = self._numbers.get(threading.get_ident())
        if number is not None:
            with self._changed:
                self._pass(number)
                self._wait(number)

    def _run(self, number: int, piece: Callable[[], None]) -> None:
        self._numbers[threading.get_ident()] = number
        try:
            with self._changed:
                self._wait(number)
            piece()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
        finally:
            with self._changed:
                self._pass(number)
                self._left.remove(number)

    def _pass(self, number: int) -> None:
        at = self._left.index(number)
        self._now = self._left[(at + 1) % len(self._left)]
        self._changed.notify_all()

    def _wait(self, number: int) -> None:
        self._changed.wait_for(lambda: self._now == number or self._error is not None)
        if self._error is not None:
            raise _Stopped

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
