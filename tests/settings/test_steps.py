"""Choices of recurrence steps and their weights are read strictly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from loopq.errors import ConfigError
from loopq.settings.steps import STEP_WEIGHTS, Calibration, parse_step_weights, parse_steps


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


def test_weights_are_names_or_an_exact_alpha():
    assert [parse_step_weights(name) for name in STEP_WEIGHTS] == list(STEP_WEIGHTS)
    assert parse_step_weights("alpha=0.15") == Fraction(3, 20)
    for bad in ("alpha=2", "alpha=-1", "alpha=", "alpha=1/0", "mean", ""):
        with pytest.raises(ConfigError, match="step_weights"):
            Calibration(step_weights=bad)
