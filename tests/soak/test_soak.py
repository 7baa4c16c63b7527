"""Every campaign, for a few seconds; `make soak` runs them at full size."""

from __future__ import annotations

import pytest

from .__main__ import SIZES, run

SHORT = {"bits": 400, "lines": 30, "models": 12}


@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_short_campaign_finds_nothing(name):
    counts = run(name, SHORT[name], seed=1)
    assert counts.failures == []
    assert sum(counts.outcomes.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ranks", "workers"])
def test_processes_that_are_killed_leave_what_others_go_on_with(name):
    assert run(name, 4, seed=1).failures == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kills", "writers", "interrupts", "disk"])
def test_runs_that_are_disturbed_end_as_others_do(name):
    assert run(name, 36, seed=1).failures == []


def test_every_campaign_has_a_short_version_somewhere():
    assert set(SHORT) | {"kills", "writers", "interrupts", "disk", "files", "ranks", "workers"} == set(SIZES)
