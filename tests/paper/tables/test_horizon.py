"""Figure 3, Tables 6 and 7: calibration horizon."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopq.paper.bench import Bench
from loopq.paper.tables.horizon import horizons
from tests.support.paper import measured_shown_and_resumed


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (32, [1, 2, 4, 8, 16, 32])]
)
def test_horizons_double_up_to_the_depth(depth: int, expected: list[int]) -> None:
    assert horizons(depth) == expected


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("horizon", huginn, tmp_path)
