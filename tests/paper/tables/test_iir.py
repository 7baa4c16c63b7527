"""Table 20: stability of recursive filters."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopq.paper.bench import Bench
from loopq.paper.tables import iir
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("iir", huginn, tmp_path)


def test_the_papers_rows_come_out() -> None:
    shown = iir.show([])
    rows = shown.tables[0].rows
    assert shown.lines[0] == "Of the paper's rows 24 of 24 come out to three decimals."
    companion = {(r[0], r[2]): (r[4], r[6]) for r in rows if r[1] == "companion"}
    assert companion["Butterworth 4", "12"] == ("0.934", "yes")
    assert companion["Chebyshev I, 6", "16"] == ("1.012", "no")
    assert shown.lines[1] == f"Rounding B, C and D moves the largest pole in 0 of {len(rows)} rows."
    (picture,) = shown.pictures()
    lines = {x.get_label(): x.get_xydata() for x in picture.figure.axes[0].get_lines()}
    assert lines["Elliptic 4"][:, 0].tolist() == [4, 6, 8, 10, 12, 16]
    assert lines["Elliptic 4"][:, 1] == pytest.approx([4.569, 1.439, 1.14, 1.002, 0.995, 0.967], abs=6e-4)
