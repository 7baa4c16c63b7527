"""Discovery: the loop that one run shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopq.errors import ConfigError, SystemContractError
from loopq.models.load import choose_system
from loopq.systems.generic import Generic, discover
from tests.support.conformance import Conformance
from tests.support.odd_loop import Odd, _ids
from tests.support.systems import CASES, build, prompts

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*",
)


def test_tied_modules_are_one_parameter_and_rows_are_told() -> None:
    torch.manual_seed(0)
    model = Odd()
    found = discover(model, _ids())
    assert found.order == ("loop.weight",)
    assert found.rows == {"loop.weight": [15, 15, 15, 15, 3]}
    assert found.depth == 5
    assert set(found.uncalled) == {"hidden.weight", "bare"}
    text = "\n".join(found.lines())
    assert "loop.weight: 5 calls, rows 15, 15, 15, 15, 3" in text
    assert "cannot be calibrated: hidden.weight" in text


@pytest.mark.parametrize("name", ["transformers HRM-Text", "Ouro", "transformers ALBERT", "TRM"])
def test_discovery_finds_what_the_adapters_declare(name: str) -> None:
    case = CASES[name]
    model = build(case)
    system = choose_system(model, None)
    batch = prompts(case)
    found = discover(model, batch, run=lambda b: system.rollout(b, system.n_steps))
    declared = {p.name: p.invocations for p in system.shared_parameters(system.n_steps)}
    left_out = set(system.left_out())
    assert {n: len(r) for n, r in found.rows.items() if n not in left_out} == declared
    assert found.order[0] == next(iter(declared))


def test_selected_but_never_observed_is_an_error() -> None:
    model = Odd()
    with pytest.raises(SystemContractError, match=r"hidden\.weight: selected but never observed"):
        Generic(model, select=("hidden*",)).shared_parameters(5)
    with pytest.raises(SystemContractError, match=r"selects no matrix"):
        Generic(model, select=("nothing*",)).shared_parameters(5)
    chosen = Generic(model, select=("loop*",)).shared_parameters(5)
    assert [p.name for p in chosen] == ["loop.weight"]
    assert chosen[0].owners == ("loop", "twin")


def test_no_loop_is_said() -> None:
    plain = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    assert "no loop" in discover(plain, _ids()).lines()[0]
    with pytest.raises(SystemContractError, match=r"no parameter is called more than once"):
        _ = Generic(plain).n_steps


def test_depth_is_what_the_model_runs() -> None:
    with pytest.raises(ConfigError, match=r"5 steps by itself"):
        Generic(Odd()).rollout(_ids(), 4)


def test_output_that_is_no_tensor_is_refused() -> None:
    class Silent(Odd):
        def forward(self, ids: torch.Tensor) -> None:
            super().forward(ids)

    with pytest.raises(SystemContractError, match=r"write an adapter"):
        discover(Silent(), _ids())


def test_generic_is_taken_only_by_name() -> None:
    with pytest.raises(SystemContractError, match=r"no looped system fits"):
        choose_system(Odd(), None)
    assert choose_system(Odd(), "generic").name == "generic"


class TestGeneric(Conformance):
    system = "generic"
