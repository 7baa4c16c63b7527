"""Choices of recurrence steps and their weights are read strictly."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError, UnknownNameError
from loopq.settings.steps import WEIGHTINGS, Calibration, parse_steps, weigher_of


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ("all", [0, 1, 2, 3]), ("first", [0]), ("0:2", [0, 1]), (":2", [0, 1]), ("1:", [1, 2, 3]), ("3", [3]),
        ("0,2:4", [0, 2, 3]), ("2,0", [0, 2]),
    ],
)  # fmt: skip
def test_parse_steps(spec, steps):
    assert parse_steps(spec, 4) == steps


@pytest.mark.parametrize("spec", ["4", "0:5", "2:2", "3:1", "", "last", "-1", "1:x", "0,9"])
def test_parse_steps_refuses(spec):
    with pytest.raises(ConfigError, match="steps"):
        parse_steps(spec, 4)


def test_weights_are_sum_or_a_registered_name(monkeypatch):
    assert weigher_of("sum") is None
    WEIGHTINGS.names()
    monkeypatch.setattr(WEIGHTINGS, "_entries", {"loud": lambda value: lambda sums, steps: [float(value)]})
    assert weigher_of("loud=2")(None, [0]) == [2.0]
    for bad in ("mean", "", "sum=1"):
        with pytest.raises(UnknownNameError, match=r"^step_weights must be sum, .*known: loud$"):
            Calibration(step_weights=bad)
