"""The section `feedback` of a diagnosis."""

from __future__ import annotations


def test_the_exposed_layer_is_studied_at_every_group_and_share(whole):
    found = whole[0]["sections"]["feedback"]
    assert found["layers"] == ["adapter.weight"]
    assert list(found["settings"]) == ["per channel", "grouped"]
