"""Tables 1 and 19: rank of each layer's input, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.tables import rank
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("rank", huginn, tmp_path)


def test_ranks_by_step_and_their_growth() -> None:
    def layer(*ranks: int, gain: float | None) -> dict[str, Any]:
        return {"dim": 40, "per_step": list(ranks), "all": 2 * ranks[-1], "gain": gain}

    layers = {
        "c.a.weight": layer(2, 4, 8, gain=8.0),
        "c.b.weight": layer(10, gain=None),
        "c.d.weight": layer(5, 10, gain=4.0),
        "c.e.weight": layer(4, 8, gain=3.0),
    }
    shown = rank.show([{"model": "m", "layers": layers, "adapters": []}])
    assert shown.tables[0].rows[:2] == (
        ("m", "a", "40", "2", "5.00 %", "4", "8", "16", "8.00x"),
        ("m", "b", "40", "10", "25.00 %", None, "10", "20", None),
    )
    # Ratios of last and first step: 4, 2 and 2, without the layer of one step.
    (claim,) = shown.claims
    assert claim.found.startswith(f"{16 ** (1 / 3):.2f} [")
    assert claim.found.endswith("over 3 inputs")
    assert claim.bound == 1.0
    (picture,) = shown.pictures()
    lines = picture.figure.axes[0].get_lines()
    assert {x.get_label(): x.get_xydata().tolist() for x in lines} == {
        "a": [[0, 2], [1, 4], [2, 8]], "d": [[0, 5], [1, 10]], "b": [[0, 10]]
    }  # fmt: skip
