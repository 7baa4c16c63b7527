"""Table 15: perturbations other than rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.tables import perturbation
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("perturbation", huginn, tmp_path)


def test_places_are_compared_over_the_mean_of_seeds() -> None:
    def row(kind: str, place: str, agreement: float) -> dict[str, Any]:
        return {"perturbation": kind, "location": place, "last": {"agreement": [agreement] * 5}}

    rows = [
        row("noise", "exposed", 0.5), row("noise", "exposed", 0.7), row("noise", "core", 0.75),
        row("rank-4", "core", 0.2), row("rank-4", "exposed", 0.3),
    ]  # fmt: skip
    shown = perturbation.show([{"model": "m", "rows": rows}])
    assert shown.tables[0].rows == (
        ("m", "noise", "60.0 %", "75.0 %", "+15.0"), ("m", "rank-4", "30.0 %", "20.0 %", "-10.0")
    )  # fmt: skip
    assert [(c.text.partition(":")[0], c.holds) for c in shown.claims] == [("noise", True), ("rank-4", False)]
