"""Which parameters are calibrated, which are left dense, and which read the same input."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loopq.calibrate.data import from_ids
from loopq.calibrate.select import pools, select, shared, treat
from loopq.errors import CalibrationError, ConfigError, NonFiniteError
from loopq.layers.shared import SharedParameter
from loopq.models.systems.generic import Generic
from loopq.quantizers.task import Pool


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
    selection = select(tiny.system, tokens, n_steps=2, exclude=("*adapter*",))
    assert selection.n_steps == 2
    assert "transformer.adapter.weight" in {p.name for p in selection.parameters}
    assert "transformer.adapter.weight" not in {p.name for p in selection.observed}
    assert {p.name for p in selection.distinct_inputs} == set(selection.input_groups.values())
    assert {p.invocations for p in selection.parameters} == {2}


def _of_experts(n_experts):
    """Three layers of each expert, with inputs of their own, and what a router of two for each token sends to them."""
    widths = {"down": (6, 4), "gate": (4, 6), "up": (4, 6)}
    parameters = [
        SharedParameter(
            f"b.experts.{e}.{x}.weight", (f"b.experts.{e}.{x}",), *wide, "out_in", 2, "expert", routed_in="b"
        )
        for e in range(n_experts)
        for x, wide in widths.items()
    ]
    first = {p.name: p.name.replace(".up.", ".gate.") for p in parameters}
    # The last expert is called first, and its layers in another order than they are declared.
    order = sorted(parameters, key=lambda p: (".down." in p.name, -parameters.index(p)))
    return parameters, first, {p.name: 2 / n_experts for p in order}


def test_experts_that_get_few_tokens_share_what_they_read():
    parameters, singles, shares = _of_experts(16)
    # Two steps of 23 tokens, and an eighth of them for each expert, are 5.75 rows for 4 inputs.
    groups, rows = shared(parameters, singles, shares, 23)
    for p in parameters:
        whole = singles[p.name] if ".down." in p.name else "b.experts.0.gate.weight"
        assert groups[p.name] == whole
    assert rows == shares | {"b.experts.0.gate.weight": 2.0}
    again = shared(
        parameters, singles, dict(sorted(shares.items(), key=lambda item: ".down." in item[0])), 23
    )
    assert again[0] == groups
    by_name = pools(parameters, groups)
    assert {by_name[n] for n in singles if ".down." not in n} == {Pool("inputs", "b.experts.0.gate.weight")}
    assert {by_name[n] for n in singles if ".down." in n} == {Pool("outputs", "b.experts.0.down.weight")}


def test_experts_that_get_many_tokens_share_nothing():
    parameters, singles, shares = _of_experts(16)
    assert shared(parameters, singles, shares, 24) == (singles, shares)
    assert pools(parameters, singles) == {}


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
