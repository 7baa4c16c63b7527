"""Memory and time of a quantization, told from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopq.errors import ConfigError
from loopq.models.build import build_shape
from loopq.run.config import QuantConfig
from loopq.run.forecast import forecast
from tests.support.vendors import dory, inkling


@pytest.mark.parametrize("kind", [dory, inkling])
def test_less_memory_takes_more_passes_then_streams_then_is_refused(kind: Any, tmp_path: Path) -> None:
    model = kind()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    system = build_shape(tmp_path)
    assert all(p.is_meta for p in system.model.parameters())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    plenty = forecast(system, QuantConfig(), 1024, memory=1 << 30)
    assert (plenty.weights, plenty.held, plenty.n_passes) == (weights, weights, 1)
    assert plenty.peak <= plenty.limit
    assert plenty.output < weights
    less = forecast(system, QuantConfig(), 1024, memory=plenty.held + plenty.most - plenty.sums // 2)
    assert less.n_passes > 1
    assert not less.streamed
    streamed = forecast(system, QuantConfig(), 1024, memory=weights + plenty.most - plenty.sums - 1)
    assert streamed.streamed
    assert streamed.held < weights
    assert streamed.seconds["reading weights"] > 0
    assert "layer by layer" in "\n".join(streamed.lines())
    with pytest.raises(ConfigError, match="above the limit"):
        forecast(system, QuantConfig(), 1024, memory=1000)
