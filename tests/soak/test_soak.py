"""Every campaign, for a few seconds; `make soak` runs them at full size."""

from __future__ import annotations

import pytest

from .__main__ import SIZES, run

SHORT = {"bits": 400, "lines": 30, "models": 12}
#: Of the others, a size for which two cores take a minute or two.
SLOW = {"disk": 16, "interrupts": 9, "kills": 24, "ranks": 4, "readers": 600, "workers": 4, "writers": 16}


@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_short_campaign_finds_nothing(name):
    counts = run(name, SHORT[name], seed=1)
    assert counts.failures == []
    assert sum(counts.outcomes.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_longer_campaign_finds_nothing(name):
    assert run(name, SLOW[name], seed=1).failures == []


def test_every_campaign_has_a_short_version_somewhere():
    assert set(SHORT) | set(SLOW) | {"files"} == set(SIZES)
