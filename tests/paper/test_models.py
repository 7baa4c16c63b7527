"""Prompts of the models of a table: each set and each draw has its own."""

from __future__ import annotations

import importlib.util

import pytest

from benches.zoo import forecaster
from loopq.calibrate.calls import CallSet
from loopq.errors import ConfigError
from loopq.paper.models import Sizes, open_source, register_source


def test_no_prompt_is_in_two_sets_or_two_draws(saved_model) -> None:
    source, sizes = open_source(str(saved_model)), Sizes(2, 1, 2, 24)
    draws = [source.prompts(sizes, draw) for draw in (0, 1)]
    sets = [s for d in draws for s in (d.calibration, d.tuning_held_out)] + [draws[0].evaluation]
    assert [len(s.sequences) for s in sets] == [2, 1, 2, 1, 2]
    assert len({prompt.tobytes() for s in sets for prompt in s.sequences}) == 8
    with pytest.raises(ConfigError, match="is beyond its end"):
        source.prompts(sizes, 10_000)


def test_the_forecaster_has_series_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(forecaster.NAME) is None:
        pytest.skip("NOT RUN: fracast is not installed; run `make ci-tools`")
    # The real series are another package's files.
    monkeypatch.setattr(forecaster, "real", lambda: (forecaster.synthetic(1, 7), ["real: a"]))
    source = open_source(forecaster.NAME)
    draws = [source.prompts(Sizes(2, 1, 3), draw) for draw in (0, 1)]
    sets = [s for d in draws for s in (d.calibration, d.tuning_held_out)] + [draws[0].evaluation]
    assert [len(s.calls) for s in sets if isinstance(s, CallSet)] == [2, 1, 2, 1, 3]
    assert len({prompt.tobytes() for s in sets for prompt in s.sequences}) == 9
    system = source.loaded.system
    calls = {p.name: p.invocations for p in system.shared_parameters(system.n_steps)}
    assert sorted(calls.values()) == [6, 6, 6, 10, 10, 10, 10]
    assert system.output == "hidden"
    with pytest.raises(ConfigError, match="its package loads it, so dtype cannot be set"):
        open_source(forecaster.NAME, dtype="bfloat16")


def test_what_a_package_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Fracast-0 is in the package fracast: pip install fracast"):
        open_source(forecaster.NAME)
    with pytest.raises(ConfigError, match="pip install statsmodels"):
        forecaster.held_out()


def test_a_name_opens_one_model() -> None:
    with pytest.raises(ConfigError, match="the model 'plbert' is registered twice"):
        register_source("plbert", forecaster.opened)
