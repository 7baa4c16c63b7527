"""The section `injection` of a diagnosis."""

from __future__ import annotations


def test_parts_are_rounded_per_channel_and_in_groups(whole):
    section = whole[0]["sections"]["injection"]
    assert list(section) == ["per channel", "grouped"]
    assert all(set(section["grouped"]) == set(rows) for rows in section.values())
