"""Discovery: the loop that one run shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopq.errors import SystemContractError
from loopq.models.discovery import discover
from loopq.models.load import choose_system
from tests.support.odd_loop import Odd, _ids
from tests.support.systems import CASES, build, prompts

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*",
)


def test_tied_modules_are_one_parameter_and_rows_are_told() -> None:
    torch.manual_seed(0)
    model = Odd()
    discovery = discover(model, _ids())
    assert discovery.order == ("loop.weight", "hidden.weight", "bare")
    assert discovery.rows == {"loop.weight": [15, 15, 15, 15, 3], "hidden.weight": [15, 15], "bare": [3, 3]}
    assert discovery.depth == 5
    assert discovery.watched == {"hidden.weight": "out_in", "bare": "in_out"}
    assert set(discovery.left_out) == {"parts", "normed", "stacked"}
    text = "\n".join(discovery.lines())
    assert "loop.weight: 5 calls, rows 15, 15, 15, 15, 3" in text
    assert "not quantized: parts: multiplied in parts" in text


@pytest.mark.parametrize("name", ["transformers HRM-Text", "Ouro", "transformers ALBERT", "TRM"])
def test_discovery_finds_what_the_adapters_declare(name: str) -> None:
    case = CASES[name]
    model = build(case)
    system = choose_system(model, None)
    batch = prompts(case)
    discovery = discover(model, batch, run=lambda b: system.rollout(b, system.n_steps))
    declared = {p.name: p.invocations for p in system.shared_parameters(system.n_steps)}
    left_out = set(system.left_out())
    assert {n: len(r) for n, r in discovery.rows.items() if n not in left_out} == declared
    assert discovery.order[0] == next(iter(declared))


class _Middle(nn.Module):
    """A loop around the middle of one list, in a holder that takes token ids; the last pass is of the last token."""

    def __init__(self, short: bool) -> None:
        super().__init__()
        self.short, self.embed = short, nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](self.embed(ids)))
        for _ in range(3):
            x = self.layers[2](torch.tanh(self.layers[1](x)))
        if self.short:
            x = torch.cat([x[:, :-1], self.layers[1](x[:, -1:])], 1)
        return self.head(self.layers[3](x))


@pytest.mark.parametrize("short", [False, True])
def test_the_looped_middle_of_one_list_is_no_list_of_experts(short: bool) -> None:
    discovery = discover(_Middle(short), _ids())
    assert discovery.rows == {
        "layers.1.weight": [15, 15, 15, *[3] * short],
        "layers.2.weight": [15, 15, 15],
    }
    assert not discovery.routed_in


def test_output_that_is_no_tensor_is_refused() -> None:
    class Silent(Odd):
        def forward(self, ids: torch.Tensor) -> None:
            super().forward(ids)

    with pytest.raises(SystemContractError, match=r"write an adapter"):
        discover(Silent(), _ids())
