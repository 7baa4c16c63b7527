"""Which parameters are calibrated, which are left dense, and which read the same input."""

from __future__ import annotations

import dataclasses

import pytest

from loopq.calibrate.select import select, treat
from loopq.errors import ConfigError


def test_patterns_must_match(tiny):
    parameters = tiny.system.shared_parameters(3)
    with pytest.raises(ConfigError, match="matches no shared parameter"):
        treat(parameters, (), ("*nothing*",))
    with pytest.raises(ConfigError, match="nothing is left"):
        treat(parameters, (), ("*",))
    kept = treat(parameters, (), ("*adapter*",))
    assert [p.treatment for p in kept] == ["dense"] + ["gptq"] * 8
    for treatment in ("dense", "rtn"):
        first = dataclasses.replace(parameters[0], treatment=treatment, reason="outside the loop")
        assert treat([first, *parameters[1:]], (), ())[0].treatment == treatment
        included = treat([first, *parameters[1:]], (first.name,), ())[0]
        assert (included.treatment, included.reason) == ("gptq", "")


def test_what_is_excluded_is_not_observed(tiny, tokens):
    found = select(tiny.system, tokens, n_steps=2, exclude=("*adapter*",))
    assert found.n_steps == 2
    assert "transformer.adapter.weight" in {p.name for p in found.parameters}
    assert "transformer.adapter.weight" not in {p.name for p in found.observed}
    assert {p.name for p in found.distinct_inputs} == set(found.input_groups.values())
    assert {p.invocations for p in found.parameters} == {2}
