"""Models that look like those of an adapter and work otherwise are refused."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import ConfigError, SystemContractError
from loopq.systems.nanbeige import _VARIANTS, Nanbeige
from tests.support.systems import CASES, build, open_system, prompts


@pytest.mark.parametrize("setting", _VARIANTS)
def test_loops_of_another_kind_are_refused(setting: str) -> None:
    model = build(CASES["Nanbeige"])
    setattr(model.config, setting, True)
    with pytest.raises(SystemContractError, match=f"config sets {setting}; only the plain loop"):
        Nanbeige(model)


def test_a_state_that_begins_otherwise_is_refused() -> None:
    case = CASES["Parcae"]
    system = open_system(case)
    system.model.config.state_init = "zero"
    with pytest.raises(SystemContractError, match="state_init is 'zero'; only 'like-init'"):
        system.rollout(prompts(case), 1)


def test_layers_that_groups_do_not_share_evenly_are_refused() -> None:
    system = open_system(CASES["transformers ALBERT, 2 groups"])
    system.model.config.num_hidden_layers = 5
    with pytest.raises(ConfigError, match="5 layers do not divide evenly among 2 groups"):
        _ = system.n_steps


def test_several_groups_have_no_single_step() -> None:
    system = open_system(CASES["transformers ALBERT, 2 groups"])
    with pytest.raises(SystemContractError, match="'albert' has no single-step function"):
        system.step(torch.zeros(1, 2, 32), None, 0, 2)
