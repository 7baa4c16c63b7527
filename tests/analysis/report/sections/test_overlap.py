"""Overlap of states, on the page."""

from __future__ import annotations

from loopq.analysis.report.sections import TABLES
from loopq.analysis.report.sections.overlap import overlaps


def test_spaces_are_ordered_by_dimension_beside_their_chance():
    rows = [
        {"between": "steps 0 and 4", "k": 64, "overlap": 0.25, "chance": 0.5},
        {"between": "two initial states", "k": 16, "overlap": 0.125, "chance": 0.03},
    ]
    text = overlaps({"sections": {"overlap": {"overlaps": rows}}})
    assert text.index("two initial states") < text.index("steps 0 and 4")
    for number in ("12.50", "3.00", "25.00", "50.00"):
        assert number in text


def test_a_diagnosis_without_it_has_no_table(diagnosis):
    without = {k: v for k, v in diagnosis["sections"].items() if k != "overlap"}
    assert TABLES.get("overlap").of({**diagnosis, "sections": without}) == ""
