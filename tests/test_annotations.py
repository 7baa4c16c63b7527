"""Values that fit an annotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from loopq.annotations import choices_of, fits, words


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [0, -(1 << 63), (1 << 64) - 1], [True, 1.0, "1", None, 1 << 64, -(1 << 63) - 1]),
        (float, [0.5, 2], [True, float("nan"), float("inf"), "1", None]),
        (bool, [True, False], [1, 0, "true", None]),
        (str, ["", "a"], [1, None, b"a"]),
        (Literal[1, "a"], [1, "a"], [True, 1.0, "1", None]),
        (Literal["a"] | None, ["a", None], ["b", False]),
        (int | None, [1, None], [False, "none"]),
        (tuple[int, ...], [(), (1, 2)], [[1], (1, 2.5), 1]),
        (Path, [Path("a")], ["a"]),
        (Any, [None, 1, "a"], []),
    ],
)
def test_what_fits(annotation, good, bad):
    assert [value for value in good if not fits(value, annotation)] == []
    assert [value for value in bad if fits(value, annotation)] == []


def test_a_message_names_what_is_allowed():
    assert words(int | None) == "a whole number or None"
    assert words(Literal[1, "a"]) == "1, 'a'"
    assert words(Path) == "Path"
    assert words(tuple[int, ...]) == "a list with a whole number in every place"


def test_choices_are_those_of_a_literal():
    assert choices_of(Literal["a", "b"]) == ("a", "b")
    assert choices_of(Literal[4, 8] | None) == (4, 8, None)
    assert choices_of(int | None) is None
