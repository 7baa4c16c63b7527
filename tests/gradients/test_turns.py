"""Pieces of work run in turns, in one order; the error of one is the error of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loopq.gradients.turns import Turns


def _noting(notes: list[tuple[str, int]], name: str, n: int, give: Callable[[], None]) -> Callable[[], None]:
    def piece() -> None:
        for i in range(n):
            notes.append((name, i))
            give()

    return piece


def test_each_runs_until_it_gives_its_turn_and_may_end_early() -> None:
    notes: list[tuple[str, int]] = []
    turns = Turns()
    turns.give()
    turns.run([_noting(notes, name, n, turns.give) for name, n in (("a", 3), ("b", 1), ("c", 2))])
    assert notes == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]


def test_an_error_stops_all() -> None:
    notes: list[tuple[str, int]] = []
    turns = Turns()

    def failing() -> None:
        turns.give()
        raise ValueError("second turn")

    with pytest.raises(ValueError, match="second turn"):
        turns.run([_noting(notes, "a", 100, turns.give), failing])
    assert notes == [("a", 0), ("a", 1)]
