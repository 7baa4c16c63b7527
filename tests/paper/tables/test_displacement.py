"""Appendices H and L: displacement and its prediction."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("displacement", huginn, tmp_path)
