"""Table 23: calibration without step 0."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loopq.paper.bench import Bench
from loopq.paper.tables.step_window import late_step_wins
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("step-window", huginn, tmp_path)


def test_layers_with_the_smaller_late_loss_are_counted() -> None:
    h = {"a": np.eye(4), "b": np.eye(4)}
    small, big = np.full((2, 4), 0.1, np.float32), np.full((2, 4), 0.5, np.float32)
    assert late_step_wins({"a": small, "b": big}, {"a": big, "b": small}, h) == (1, 2)
    assert late_step_wins({"a": small}, {"a": small}, h) == (0, 1)
