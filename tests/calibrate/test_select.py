"""Which parameters are calibrated, which are left dense, and which read the same input."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loopq.calibrate.data import from_ids
from loopq.calibrate.select import select, treat
from loopq.errors import CalibrationError, ConfigError, NonFiniteError
from loopq.models.systems.generic import Generic


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


class _Damaged(torch.nn.Module):
    def __init__(self, name, value):
        super().__init__()
        self.table, self.core = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 16)
        self.head, self.idle = torch.nn.Linear(16, 32), torch.nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            dict(self.named_parameters())[name].view(-1)[2] = value

    def forward(self, ids):
        raise AssertionError("run before it was looked at")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["table.weight", "core.weight", "head.weight"])
def test_a_damaged_weight_is_named_before_anything_is_run(name, value):
    with pytest.raises(NonFiniteError, match=rf"own {name} holds NaN or infinity, at \[0, 2\]"):
        select(Generic(_Damaged(name, value)), from_ids([[1, 2, 3]]))


def test_infinity_in_a_vector_may_be_meant():
    with pytest.raises(CalibrationError, match="run before it was looked at"):
        select(Generic(_Damaged("idle", float("-inf"))), from_ids([[1, 2, 3]]))
    with pytest.raises(NonFiniteError, match="own idle holds NaN"):
        select(Generic(_Damaged("idle", float("nan"))), from_ids([[1, 2, 3]]))
