"""Section 5: agreement by step."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("agreement", huginn, tmp_path)
