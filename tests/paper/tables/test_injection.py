"""Figure 1a, Tables 3 and 4: one scale per row in parts of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.tables import injection
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("injection", huginn, tmp_path)


def test_parts_of_the_loop_are_compared_at_the_last_step() -> None:
    def run(first: float, last: float) -> dict[str, Any]:
        return {
            "agreement": [first, last],
            "steps": [1, 2],
            "kl": [9.0, 1 - last],
            "last": {"agreement": [last] * 5},
        }

    paired = {"none": run(1, 1), injection.EXPOSED: run(0.5, 0.25), injection.CORE: run(0.75, 0.75),
              injection.ALL: run(0.5, 0.2), injection.GAUSSIAN: run(0.5, 0.2)}  # fmt: skip
    cured = paired | {injection.EXPOSED: run(0.5, 0.5)}
    shown = injection.show([{"model": "m", "runs": {"paired": paired, injection.GROUPED: cured}}])
    rows = shown.tables[0].rows
    assert len(rows) == 10
    assert rows[1] == ("m", "paired", "exposed layers", "50.0 %", "25.0 %", "[25.0, 25.0]", "0.75")
    assert [c.found.split()[0] for c in shown.claims] == ["+25.0", "+50.0", "-5.0"]
    assert [c.holds for c in shown.claims] == [True, True, False]
    (picture,) = shown.pictures()
    lines = picture.figure.axes[0].get_lines()
    assert [x.get_label() for x in lines] == [injection.WORDS[n] for n in paired if n != "none"]
    assert lines[0].get_xydata().tolist() == [[1, 50], [2, 25]]
    plain = injection.show([{"model": "m", "runs": {"paired": paired}}])
    assert len(plain.claims) == 2
