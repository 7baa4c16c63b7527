"""Every part of the campaigns, for a few seconds; `make soak` runs them at full size."""

from __future__ import annotations

import pytest

from .__main__ import PARTS, run

SHORT = {"flips": 400, "lines": 30}
#: Of the others, a size for which two cores take a minute or two.
SLOW = {
    "arrays": 300, "changes": 8, "failpoints": 40, "interrupts": 9, "kills": 24, "limits": 16, "models": 12,
    "holders": 9, "nodes": 40, "options": 60, "ranks": 4, "readers": 60, "records": 4, "workers": 4, "writers": 16,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_short_campaign_finds_nothing(name):
    counts = run([name], SHORT, seed=1)[name]
    assert counts.failures == []
    assert counts.n_tried > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_longer_campaign_finds_nothing(name):
    assert run([name], SLOW, seed=1)[name].failures == []


def test_every_campaign_has_a_short_version_somewhere():
    assert set(SHORT) | set(SLOW) | {"sealed"} == set(PARTS)
    assert len({part.campaign for part in PARTS.values()}) == 8
