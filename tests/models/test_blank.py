"""Modules built without their values: real buffers, untouched parameters, and no effect on anything else."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from loopq.models.blank import blank
from loopq.models.modes import Blank, Drawn


def _made() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(3, 2), nn.LayerNorm(2))


def test_parameters_have_no_memory_and_buffers_have_values() -> None:
    module = blank(_made, memory=False)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert module[0].running_var.tolist() == [1.0] * 4
    assert not nn.Linear(3, 2).weight.is_meta


def test_tied_parameters_stay_tied_without_memory() -> None:
    def make() -> nn.Module:
        pair = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        pair[1].weight = pair[0].weight = nn.Parameter(torch.ones(3, 3))
        return pair

    module = blank(make, memory=False)
    assert module[0].weight is module[1].weight
    assert module[0].weight.is_meta


def test_a_constructor_that_computes_with_parameters_has_them() -> None:
    class Computes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("doubled", self.linear.weight.detach().cpu() * 2)

    module = blank(Computes, memory=False)
    assert module.linear.weight.is_meta
    assert not module.doubled.is_meta


def test_nothing_is_drawn_into_parameters() -> None:
    before = torch.get_rng_state()
    module = blank(lambda: nn.Sequential(nn.Linear(64, 64), nn.Embedding(9, 4)))
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), before)


def test_under_a_device_everything_is_there() -> None:
    with torch.device("meta"):
        module = blank(_made)
    assert {t.device.type for t in module.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("draw", [nn.init.normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_])
def test_draws_are_those_of_the_seed_and_leave_the_generator(draw: object) -> None:
    drawn, expected = torch.empty(4, 4), torch.empty(4, 4)
    torch.manual_seed(5)
    draw(expected)  # type: ignore[operator]
    before = torch.get_rng_state()
    with Drawn(seed=5):
        draw(drawn)  # type: ignore[operator]
        nn.init.ones_(torch.empty(2))
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_threads_build_modules_as_ever() -> None:
    there: list[nn.Linear] = []
    with Blank():
        thread = threading.Thread(target=lambda: there.append(nn.Linear(64, 64)))
        thread.start()
        thread.join()
    assert there[0].weight.device.type == "cpu"
    assert 0 < float(there[0].weight.detach().std()) < 1
