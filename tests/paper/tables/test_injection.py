"""Figure 1a, Tables 3 and 4: one scale per row in parts of the loop."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("injection", huginn, tmp_path)
