"""Records of quality: means over draws, and what they are related to."""

from __future__ import annotations

import pytest

from benches.quality.variants import RTN, TRAJECTORY, related


def record(variant, kl, draw=0):
    return {
        "model": "m", "bits": 4, "group_size": 32, "variant": variant, "tier": "closed form", "draw": draw,
        "n_bytes": 100, "output": "logits", "kl": kl, "agreement": 0.9, "seconds": 1.0,
    }  # fmt: skip


def test_rows_are_means_over_draws_related_to_rounding_and_to_trajectory():
    rows = related(
        [record(RTN, 0.8), record(TRAJECTORY, 0.1, 0), record(TRAJECTORY, 0.3, 1), record("x", 0.4)]
    )
    found = {row["variant"]: row for row in rows}
    assert found[TRAJECTORY]["kl"] == pytest.approx(0.2)
    assert found[TRAJECTORY]["n_draws"] == 2
    assert found["x"]["gap_closed"] == pytest.approx(0.5)
    assert found["x"]["ratio_to_trajectory"] == pytest.approx(2.0)
    assert found[RTN]["gap_closed"] == 0.0


def test_without_rounding_there_is_no_gap():
    (row,) = related([record("x", 0.4)])
    assert "gap_closed" not in row
    assert "ratio_to_trajectory" not in row
