"""Layers that keep their values."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig


def test_a_dense_layer_has_no_codes():
    config = LayerConfig.of(method="dense")
    with pytest.raises(ConfigError, match=r"layer x: method 'dense' leaves a layer as it is"):
        config.quantize(Problem("x", np.ones((2, 4), np.float32), None, config.grid))
