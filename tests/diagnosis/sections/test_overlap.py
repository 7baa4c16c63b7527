"""The section `overlap` of a diagnosis."""

from __future__ import annotations


def test_overlaps_of_the_end_steps_and_the_adapters_output(whole):
    found = whole[0]["sections"]["overlap"]
    assert set(found) == {"overlaps", "output_ratio"}
    assert found["output_ratio"]
