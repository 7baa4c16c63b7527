"""Memory and time of a quantization, told from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopq.run.forecast import Forecast, forecast

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError
from loopq.models.build import build_shape
from loopq.run.config import QuantConfig
from loopq.settings.execution import Execution
from loopq.systems.base import LoopedSystem
from tests.support.looptoys import LinearLoop, LinearSystem
from tests.support.vendors import dory, inkling

_PLAIN = QuantConfig().with_metric("inputs")


def _told(
    system: LoopedSystem, memory: int | None, config: QuantConfig = _PLAIN, batch_size: int = 8
) -> Forecast:
    prompts = TokenSet((np.zeros(64, np.int64),) * 16, "a text", "windows")
    return forecast(system, config, prompts, Execution(memory=memory, batch_size=batch_size))


@pytest.mark.parametrize("kind", [dory, inkling])
def test_less_memory_means_more_passes_then_streams_then_refusal(
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


def test_sizes_are_those_of_the_shapes() -> None:
    config = QuantConfig.of(method="gptq", bits=4, group_size=4)
    system = LinearSystem(LinearLoop(width=8, vocab=11))
    sizes = _told(system, 1 << 30, config)
    wide, codes = (16, 8), 8 * 16 + 8 * 8
    assert sizes.weights == sizes.held == 8 * (codes + 2 * 11 * 8)
    assert sizes.sums == sum(8 * w * (w + 1) for w in wide)
    assert sizes.codes == codes
    assert sizes.output == sizes.weights - 2 * codes + codes // 2 + 2 * (8 * 4 + 8 * 2)
    assert (sizes.n_passes, sizes.n_tokens) == (1, 16 * 64)
    assert sizes.limit == 1 << 30
    assert sizes.sums < sizes.most < sizes.sums + 100_000
    assert set(sizes.seconds) == {"rollouts", "Hessians", "solves", "gradients"}


def test_half_the_room_takes_twice_the_passes() -> None:
    config = QuantConfig.of(method="gptq", bits=4, group_size=4)
    system = LinearSystem(LinearLoop(width=64))
    plenty = _told(system, 1 << 30, config)
    solves = plenty.most - plenty.sums
    largest = 8 * 128 * 129
    exact = _told(system, plenty.held + solves + plenty.sums, config)
    assert (exact.n_passes, exact.peak) == (1, exact.limit)
    less = _told(system, plenty.held + solves + plenty.sums - 1, config)
    assert (less.n_passes, less.peak) == (2, less.limit)
    assert not _told(system, plenty.held + solves + largest, config).streamed
    with pytest.raises(ConfigError, match="above the limit of"):
        _told(system, plenty.held + solves + largest - 1, config)


def _made(**changes: Any) -> Forecast:
    values = {
        "weights": 4_000_000, "held": 4_000_000, "sums": 2_000_000, "most": 1_000_000, "codes": 500_000,
        "output": 700_000, "limit": 5_000_000, "n_passes": 3, "n_tokens": 12_345,
        "seconds": {"rollouts": 100.0, "solves": 30.0, "gradients": 0.9},
    }  # fmt: skip
    return Forecast(**(values | changes))


def test_lines_say_what_is_held_stored_and_waited_for() -> None:
    weights, sums, disk, after, memory, time = _made().lines()
    assert weights == "weights: 4.00 MB (4,000,000 bytes), all in memory: 4.00 MB at once"
    for words in ("2.00 MB of all layers, 1.00 MB at once", "in 3 passes over 12,345 tokens"):
        assert words in sums
    assert disk.startswith("disk: checkpoint 700.00 kB, and until it is written 500.00 kB for codes")
    assert after.endswith("evaluate holds 4.00 MB at once, run 700.00 kB, export to another format 1.70 MB")
    assert memory == "memory: 5.00 MB (5,000,000 bytes) of 5.00 MB"
    assert time == "time: 2 min (131 seconds: rollouts 2 min, solves 30 s)"


def test_what_does_not_fit_is_said() -> None:
    assert not _made().streamed
    streamed = _made(held=1_000_000)
    assert streamed.streamed
    assert streamed.peak == 2_000_000
    assert "read layer by layer, since they do not fit: 1.00 MB at once" in streamed.lines()[0]
    assert "above the limit" not in streamed.lines()[4]
    assert "above the limit" in _made(limit=4_999_999).lines()[4]
