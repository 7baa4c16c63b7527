"""The section `perturbation` of a diagnosis."""

from __future__ import annotations


def test_its_data_has_what_the_page_reads(diagnosis):
    assert set(diagnosis["sections"]["perturbation"]) == {"locations", "norm", "rows"}
