"""Section 5: agreement by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE, RTN
from loopq.paper.tables import agreement
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("agreement", huginn, tmp_path)


def test_the_last_step_of_each_variant_is_compared() -> None:
    def run(*agreement: float, last: float) -> dict[str, Any]:
        by_prompt = {"agreement": [last] * 6}
        return {
            "agreement": agreement, "agreement_pooled": [0.3, last], "steps": [1, 2], "last": by_prompt
        }  # fmt: skip

    runs = {RTN: run(0.5, 0.25, last=0.2), ONE: run(0.5, 0.5, last=0.6), ALL: run(0.75, 1.0, last=0.5)}
    shown = agreement.show([{"model": "m", "runs": runs}])
    assert shown.tables[0].rows == (
        ("m", RTN, "50.0, 25.0", "20.0 %"), ("m", ONE, "50.0, 50.0", "60.0 %"), ("m", ALL, "75.0, 100.0", "50.0 %")
    )  # fmt: skip
    assert [(c.holds, c.found) for c in shown.claims] == [
        (True, "+30.0 points of agreement [+30.0, +30.0]"), (False, "-10.0 points of agreement [-10.0, -10.0]")
    ]  # fmt: skip
    (picture,) = shown.pictures()
    lines = picture.figure.axes[0].get_lines()
    assert [x.get_ydata().tolist() for x in lines] == [[50, 25], [50, 50], [75, 100]]
