"""Parcae: a state that decays; what every system must show."""

from __future__ import annotations

import pytest

from loopq.errors import SystemContractError
from tests.support.conformance import SteppingConformance, gradients_are_those_of_the_unrolled_loop
from tests.support.systems import CASES, open_system, prompts


class TestParcae(SteppingConformance):
    system = "parcae"


def test_rollouts_have_the_gradients_of_the_unrolled_loop() -> None:
    gradients_are_those_of_the_unrolled_loop("Parcae")


def test_a_state_that_begins_otherwise_is_refused() -> None:
    case = CASES["Parcae"]
    system = open_system(case)
    system.model.config.state_init = "zero"
    with pytest.raises(SystemContractError, match="state_init is 'zero'; only 'like-init'"):
        system.rollout(prompts(case), 1)
