"""Memory and time of a quantization, told from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError
from loopq.models.build import build_shape
from loopq.run.config import QuantConfig
from loopq.run.forecast import Forecast, forecast
from loopq.settings.execution import Execution
from loopq.systems.base import LoopedSystem
from tests.support.vendors import dory, inkling

_PLAIN = QuantConfig().with_metric("inputs")


def _told(
    system: LoopedSystem, memory: int | None, config: QuantConfig = _PLAIN, batch_size: int = 8
) -> Forecast:
    prompts = TokenSet((np.zeros(64, np.int64),) * 16, "a text", "windows")
    return forecast(system, config, prompts, Execution(memory=memory, batch_size=batch_size))


@pytest.mark.parametrize("kind", [dory, inkling])
def test_less_memory_takes_more_passes_then_streams_then_is_refused(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    system = build_shape(tmp_path)
    assert all(p.is_meta for p in system.model.parameters())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    plenty = _told(system, 1 << 30)
    assert (plenty.weights, plenty.held, plenty.n_passes) == (weights, weights, 1)
    assert plenty.peak <= plenty.limit
    assert plenty.output < weights
    # Without a limit a run plans with nine tenths of the free memory, as quantize does.
    monkeypatch.setattr("loopq.run.forecast.available_bytes", lambda: 10 << 20)
    assert _told(system, None).limit == 9 << 20
    less = _told(system, plenty.held + plenty.most - plenty.sums // 2)
    assert less.n_passes > 1
    assert not less.streamed
    streamed = _told(system, weights + plenty.most - plenty.sums - 1)
    assert streamed.streamed
    assert streamed.held < weights
    assert streamed.seconds["reading weights"] > 0
    assert "layer by layer" in "\n".join(streamed.lines())
    alone = _told(system, streamed.limit, batch_size=1)
    assert alone.seconds["reading weights"] > 2 * streamed.seconds["reading weights"]
    default = _told(system, 1 << 30, QuantConfig())
    assert default.seconds["gradients"] > plenty.seconds["gradients"] == 0
    assert default.sums > plenty.sums
    with pytest.raises(ConfigError, match="above the limit"):
        _told(system, 1000)
