"""Table 24: Wilson intervals of the scores."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE, RTN
from loopq.paper.tables import intervals
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("intervals", huginn, tmp_path)


def test_counts_become_shares_with_their_intervals() -> None:
    one, none = [1.0] * 6 + [0.0] * 2, [0.0] * 8
    variants = {RTN: none, ONE: none, ALL: one}
    shown = intervals.show([{"model": "m", "variants": {n: {"answered": v} for n, v in variants.items()}}])
    (table,) = shown.tables
    assert len(table.rows) == 8 + 3
    # Wilson: (p + z^2/2n +- z sqrt(p (1 - p) / n + z^2/4n^2)) / (1 + z^2/n) for 460 of 1,319 and 6 of 8.
    assert table.rows[0] == ("Huginn 3.5B (paper)", "full precision", "460 of 1319", "34.9 %", "[32.4, 37.5]")
    assert table.rows[-1] == ("m", ALL, "6 of 8", "75.0 %", "[40.9, 92.9]")
    assert shown.lines == ["Of the paper's intervals 8 of 8 come out of its counts."]
    assert [(c.text, c.asked) for c in shown.claims] == [
        (f"{ALL} gets more last tokens right than {other}", False) for other in (RTN, ONE)
    ]
