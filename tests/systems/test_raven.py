"""Prelude, adapter, core and coda, common to Huginn and R-Llama."""

from __future__ import annotations

import pytest

from loopq.errors import SystemContractError
from tests.support.systems import CASES, open_system


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("test_time_noise", 0.5, "test_time_noise = 0.5 draws from the global generator"),
        ("initial_state_mode", "prelude", "initial_state_mode = 'prelude' begins from the prelude's output"),
    ],
)
def test_noise_of_another_kind_is_refused(setting: str, value: object, said: str) -> None:
    system = open_system(CASES["Huginn"])
    setattr(system.model.config, setting, value)
    with pytest.raises(SystemContractError, match=said):
        system.check_depth(2)
