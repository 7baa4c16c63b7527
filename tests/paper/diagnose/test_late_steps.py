"""Layers whose proxy at a late step is the smaller one."""

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.paper.diagnose.late_steps import late_step_wins


def test_late_step_wins_counts_layers():
    h = {"a": np.eye(4), "b": np.eye(4)}
    small, big = np.full((2, 4), 0.1, np.float32), np.full((2, 4), 0.5, np.float32)
    assert late_step_wins({"a": small, "b": big}, {"a": big, "b": small}, h) == (1, 2)
    assert late_step_wins({"a": small}, {"a": small}, h) == (0, 1)
    with pytest.raises(ConfigError, match="same layers"):
        late_step_wins({"a": small}, {"b": small}, h)
