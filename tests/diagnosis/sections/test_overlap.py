"""The section `overlap` of a diagnosis."""

from __future__ import annotations


def test_overlaps_are_of_first_and_last_step_and_the_adapters_output_is_measured(whole):
    found = whole[0]["sections"]["overlap"]
    assert set(found) == {"overlaps", "output_ratio"}
    assert found["output_ratio"]
