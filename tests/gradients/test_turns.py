"""Pieces of work run in turns, in one order; the error of one is the error of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from loopq.gradients.turns import Turns


def _noting(notes: list[tuple[str, int]], name: str, n: int, give: Callable[[], None]) -> Callable[[], None]:
    def piece() -> None:
        for i in range(n):
            notes.append((name, i))
            give()

    return piece


def test_each_goes_on_until_it_gives_its_turn_and_one_may_end_before_others() -> None:
    notes: list[tuple[str, int]] = []
    turns: list[Turns] = []
    pieces = [_noting(notes, name, n, lambda: turns[0].give()) for name, n in (("a", 3), ("b", 1), ("c", 2))]
    turns.append(Turns(pieces))
    turns[0].give()
    turns[0].run()
    assert notes == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]


class _Shared:
    def __init__(self) -> None:
        self.value, self.parts = 0, {"a": 1}


@pytest.mark.parametrize("fails", [False, True])
def test_what_one_sets_is_undone_while_others_run(fails: bool) -> None:
    shared, turns, seen = _Shared(), [], []

    def piece(number: int) -> None:
        seen.append((shared.value, hasattr(shared, "more"), dict(shared.parts)))
        shared.value, shared.more = number, number  # type: ignore[attr-defined]
        del shared.parts["a"]
        shared.parts["b"] = number
        turns[0].give()
        if fails and number == 2:
            raise ValueError("second")
        assert (shared.value, shared.more, shared.parts) == (number, number, {"b": number})  # type: ignore[attr-defined]

    turns.append(Turns([lambda: piece(1), lambda: piece(2)], [shared]))
    with pytest.raises(ValueError, match="second") if fails else contextlib.nullcontext():
        turns[0].run()
    assert seen == [(0, False, {"a": 1})] * 2
    assert vars(shared) == {"value": 0, "parts": {"a": 1}}


def test_an_error_stops_all() -> None:
    notes: list[tuple[str, int]] = []
    turns: list[Turns] = []

    def failing() -> None:
        turns[0].give()
        raise ValueError("second turn")

    turns.append(Turns([_noting(notes, "a", 100, lambda: turns[0].give()), failing]))
    with pytest.raises(ValueError, match="second turn"):
        turns[0].run()
    assert notes == [("a", 0), ("a", 1)]
