"""Pieces of a page: shades of a heat map."""

from __future__ import annotations

from loopq.report.errors import error_maps
from loopq.report.markup import Shades
from tests.report.conftest import errors


def test_what_is_not_finite_is_a_dash():
    found = errors(Q4=1.0)
    found["weights"]["Q4"]["moved"]["core.0.mlp.weight"] = [0.1, 0.1, None, None]
    assert error_maps(found, None).count("<td>-</td>") == 2


def test_shades_are_equal_ratios():
    shades = Shades.of([0.01, 0.16, None])
    assert [shades.of_value(v) for v in (0.001, 0.01, 0.0399, 0.041, 0.159, 0.16, 1.0)] == [
        0,
        0,
        3,
        3,
        6,
        6,
        6,
    ]
    # Nearly equal values have nearly equal shades.
    assert {Shades.of([0.1, 0.11]).of_value(v) for v in (0.1, 0.11)} == {6}
    assert Shades.of([0.0]).of_value(0.0) == 0
    assert Shades.of([]).of_value(1.0) == 6


def test_many_steps_are_thinned_and_said():
    found = errors(Q4=1.0)
    for rows in found["weights"]["Q4"].values():
        rows.update({name: [0.1] * 60 for name in rows})
    text = error_maps(found, None)
    assert "Error as it arrives [%], 1 step of 3 is shown" in text
    assert "<th scope=col>59</th>" in text
    assert "<th scope=col>58</th>" not in text
