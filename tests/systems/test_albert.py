"""ALBERT: one block for all layers; what every system must show."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import ConfigError, SystemContractError
from tests.support.conformance import SteppingConformance
from tests.support.systems import CASES, open_system


class TestAlbert(SteppingConformance):
    system = "albert"


def test_layers_that_groups_do_not_share_evenly_are_refused() -> None:
    system = open_system(CASES["transformers ALBERT, 2 groups"])
    system.model.config.num_hidden_layers = 5
    with pytest.raises(ConfigError, match="5 layers do not divide evenly among 2 groups"):
        _ = system.n_steps


def test_several_groups_have_no_single_step() -> None:
    system = open_system(CASES["transformers ALBERT, 2 groups"])
    with pytest.raises(SystemContractError, match="'albert' has no single-step function"):
        system.step(torch.zeros(1, 2, 32), None, 0, 2)
