"""Nanbeige: the whole stack, norms between loops; what every system must show."""

from __future__ import annotations

import pytest

from loopq.errors import SystemContractError
from loopq.systems.nanbeige import _VARIANTS, Nanbeige
from tests.support.conformance import SteppingConformance
from tests.support.systems import CASES, build


class TestNanbeige(SteppingConformance):
    system = "nanbeige"


@pytest.mark.parametrize("setting", _VARIANTS)
def test_loops_of_another_kind_are_refused(setting: str) -> None:
    model = build(CASES["Nanbeige"])
    setattr(model.config, setting, True)
    with pytest.raises(SystemContractError, match=f"config sets {setting}; only the plain loop"):
        Nanbeige(model)
