"""Algorithm 1: trajectory calibration, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE, RTN
from loopq.paper.tables import algorithm
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("algorithm", huginn, tmp_path)


def test_losses_are_relative_to_those_of_rounding() -> None:
    def layer(*all_steps: float) -> dict[str, Any]:
        rtn = [4.0] * len(all_steps)
        return {
            "steps": len(all_steps),
            "losses": {RTN: rtn, ONE: [1.0, 8.0][: len(rtn)], ALL: list(all_steps)},
        }

    layers = {f"c.{i}.weight": layer(2.0, 2.0) for i in range(5)} | {"c.e.weight": layer(40.0)}
    shown = algorithm.show([{"model": "m", "layers": layers}])
    rows = shown.tables[0].rows
    assert rows[0][2:] == ("2", "0.250", "0.500", "1.125", "0.500")
    assert rows[5][2:] == ("1", "0.250", "10.000", "0.250", "10.000")
    # Layers of a single step have no trajectory and do not count.
    assert [(c.found, c.holds) for c in shown.claims] == [("5 of 5 layers", True)] * 2
