"""The section `groups` of a diagnosis."""

from __future__ import annotations

from tests.support.diagnosed import QUICK


def test_a_row_for_every_group_size(whole):
    rows = whole[0]["sections"]["groups"]["rows"]
    assert [row["group_size"] for row in rows] == list(QUICK.group_sizes)
