"""Steps and weights that a sum of Hessians takes."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.run.step_weights import relative


def test_weights_that_leave_no_step_are_refused():
    with pytest.raises(ConfigError, match=r"leave no step of \[0, 1\]"):
        relative([0, 1], [0.0, 0.0])


def test_equal_weights_are_the_plain_sum_and_steps_without_weight_are_left_out():
    assert relative([3, 5], None) == ([3, 5], None, None)
    assert relative([3, 5, 7], [2.0, 0.0, 2.0]) == ([3, 7], None, [0.5, 0.0, 0.5])
    assert relative([3, 5], [1.0, 3.0]) == ([3, 5], [1 / 3, 1.0], [0.25, 0.75])
