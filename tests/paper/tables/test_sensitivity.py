"""Table 16: layers by three measures of sensitivity."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from loopq.paper.bench import Bench
from loopq.paper.tables import sensitivity
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("sensitivity", huginn, tmp_path)


def test_layers_stand_by_damage_with_their_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(damage: int, gain: int, trace: int | None) -> dict[str, int | None]:
        return {
            "ablation": damage, "random-direction gain": gain, "Hessian trace": trace, "ablation per channel": 1
        }  # fmt: skip

    def layer(changed: float, row: float) -> dict[str, Any]:
        return {"changed": changed, "per_channel": {"changed": row, "by_prompt": [row] * 5}}

    result = {
        "model": "m",
        "measure": "changed",
        "table": {
            "places": {"c.a.weight": place(2, 1, None), "c.b.weight": place(1, 2, 3)},
            "spearman": {"random-direction gain": 0.0},
        },
        "layers": {
            "c.a.weight": layer(0.05, 0.2),
            "c.b.weight": layer(0.125, 0.5),
            "c.d.weight": layer(0.0, 0.1),
        },
        "exposed": ["c.b.weight"],
    }
    # A correlation of fewer layers has no interval that could exclude a half.
    monkeypatch.setattr(sensitivity, "MIN_LAYERS", 3)
    assert len(sensitivity.show([result]).claims) == 1
    monkeypatch.setattr(sensitivity, "MIN_LAYERS", 2)
    shown = sensitivity.show([result])
    assert shown.tables[0].rows == (
        ("m", "b", "12.50 %", "2", "3", "1"),
        ("m", "a", "5.00 %", "1", None, "1"),
    )
    ranking, worst = shown.claims
    # Fisher: tanh(+-1.96 sqrt(1.06)), as for four layers or fewer.
    assert ranking.found == "Spearman correlation +0.00 [-0.97, +0.97]"
    assert (ranking.bound, ranking.below) == (0.5, True)
    assert (worst.holds, worst.found) == (True, "+30.0 points beyond a [+30.0, +30.0]")
    del result["table"]["spearman"]["random-direction gain"]
    result["table"]["spearman"]["random-direction gain"] = None
    assert len(sensitivity.show([result]).claims) == 1


def test_the_interval_of_a_correlation_is_fishers() -> None:
    interval = sensitivity._fisher(0.5, 28)
    half = 1.96 * math.sqrt(1.06 / 25)
    assert (interval.low, interval.high) == pytest.approx(
        (math.tanh(math.atanh(0.5) - half), math.tanh(math.atanh(0.5) + half))
    )
    assert (interval.estimate, interval.n, interval.level) == (0.5, 28, 0.95)
    assert sensitivity._fisher(1.0, 9).low < 1
