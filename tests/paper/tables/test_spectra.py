"""Figure 5 and Table 22: eigenvalues by threshold, prompts and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopq.paper.bench import Bench
from loopq.paper.tables import spectra
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("spectra", huginn, tmp_path)


def test_counts_are_shown_by_threshold_and_spectra_drawn() -> None:
    def described(rank: int) -> dict[str, Any]:
        ranks = {f"{tau:g}": 1000 * rank + i for i, tau in enumerate(spectra.THRESHOLDS)}
        return {
            "ranks": ranks, "rank": rank, "effective_rank": 2.6, "stable_rank": 1.25,
            "curve": {"index": [1, 3], "value": [0.5, 0.0]},
        }  # fmt: skip

    kinds = {kind: described(i) for i, kind in enumerate((spectra.FEW, spectra.MANY, spectra.STEPS), 1)}
    layers = {"c.a.weight": kinds, "c.b.weight": kinds}
    found: dict[str, Any] = {"model": "m", "layers": layers, "more": [[4, 2], [6, 3], [8, 4], [2, 1], [9, 6]]}
    shown = spectra.show([found])
    table = shown.tables[0]
    assert [row[1:4] for row in table.rows[:3]] == [
        ("c.a", spectra.FEW, "1,000"), ("c.a", spectra.MANY, "2,000"), ("c.a", spectra.STEPS, "3,000")
    ]  # fmt: skip
    assert table.rows[4][3:] == (*(f"2,{i:03d}" for i in range(len(spectra.THRESHOLDS))), "3", "1.2")
    (claim,) = shown.claims
    assert claim.interval.estimate == pytest.approx((2**4 * 1.5) ** 0.2)
    assert (claim.holds, claim.interval.n) == (True, 5)
    assert spectra.show([found | {"more": []}]).claims == []
    (picture,) = shown.pictures()
    first, second = picture.figure.axes
    assert (first.get_title(), second.get_title(), first.get_xscale()) == ("m: c.a", "m: c.b", "log")
    assert first.get_lines()[0].get_xydata().tolist() == [[1, 0.5], [3, 1e-12]]
