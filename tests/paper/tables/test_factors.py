"""Equation 2: factors of a step's Jacobian."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from loopq.paper.tables import factors
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("factors", huginn, tmp_path)


def test_a_wrong_product_and_an_identity_adapter_are_reported() -> None:
    def prompts(gap: float, adapter: float) -> list[dict[str, object]]:
        identity = {"adapter": adapter, "block.0": 0.9, "block.1": 0.5}
        return [{"gap": gap, "gain": dict.fromkeys(identity, 1.0), "identity": identity}] * 6

    for gap, adapter, holds in ((1e-6, 0.1, True), (0.2, 0.7, False)):
        result = {"model": "m", "rows": prompts(gap, adapter)}
        assert [c.holds for c in factors.show([result]).claims] == [holds, holds]
