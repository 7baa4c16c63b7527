"""The section `injection` of a diagnosis."""

from __future__ import annotations


def test_parts_are_rounded_per_channel_and_in_groups(whole):
    found = whole[0]["sections"]["injection"]
    assert list(found) == ["per channel", "grouped"]
    assert all(set(found["grouped"]) == set(rows) for rows in found.values())
