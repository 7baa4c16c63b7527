"""Several pieces of work in turns: each piece runs until it gives its turn to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: Maximum seconds until a stopped thread ends.
_PATIENCE = 60.0


class _Stopped(Exception):
    """Another piece failed, so this one is no longer needed."""


#: Attributes of a module that belong to all pieces. Those who read layers change them at each visit.
_SHARED = ("_parameters", "_buffers")


class Turns:
    """Threads that run one at a time, in a fixed order.

    Pieces that need the same weights then need them together. Each piece waits before it uses them (`give`). When all
    pieces have arrived, the weights are read once.

    Parameters
    ----------
    pieces : sequence of callable
        Functions to run in turns. The first one begins.
    objects : iterable of object
        Objects that all pieces use. What a piece sets there (attributes, submodules, hooks) is undone while others run.
    """

    def __init__(self, pieces: Sequence[Callable[[], None]], objects: Iterable[Any] = ()) -> None:
        self._pieces, self._left = pieces, list(range(len(pieces)))
        tables = [table for one in objects for table in _tables(one)]
        self._start = [(table, dict(table)) for table in tables]
        self._now, self._changed = 0, threading.Condition()
        self._numbers: dict[int, int] = {}
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run all pieces to their end. The first error stops all and is raised."""
        threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in self._left]
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
        finally:
            self._undo()
        if self._error is not None:
            raise self._error

    def give(self) -> None:
        """Let all others run until they give their turn. Threads of other work have no turn."""
        number = self._numbers.get(threading.get_ident())
        if number is not None:
            own = self._undo()
            with self._changed:
                self._pass(number)
                self._wait(number)
            for table, values in own:
                _assign(table, values)

    def _undo(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return what the present piece has set, and restore what was there at the start."""
        changed = [(table, start, dict(table)) for table, start in self._start if not _same(table, start)]
        for table, start, _ in changed:
            _assign(table, start)
        return [(table, values) for table, _, values in changed]

    def _run(self, number: int) -> None:
        self._numbers[threading.get_ident()] = number
        try:
            with self._changed:
                self._wait(number)
            self._pieces[number]()
            self._undo()
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


def _tables(one: Any) -> list[dict[str, Any]]:
    """The attributes of an object, and those of them that are tables."""
    own = vars(one)
    return [own, *(t for name, t in own.items() if isinstance(t, dict) and name not in _SHARED)]


def _same(table: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(table) == len(other) and all(
        a is b and x is y for (a, x), (b, y) in zip(table.items(), other.items(), strict=True)
    )


def _assign(table: dict[str, Any], values: dict[str, Any]) -> None:
    table.clear()
    table.update(values)
