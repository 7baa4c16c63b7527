"""Which adapter fits a model."""

from __future__ import annotations

import pytest

from loopq import systems
from loopq.errors import SystemContractError
from loopq.systems.huginn import Huginn
from loopq.systems.ouro import Ouro
from tests.support.systems import CASES, build


def test_a_model_that_several_adapters_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CASES["Huginn"])
    monkeypatch.setattr(systems, "fitting_systems", lambda _: [Huginn, Ouro])
    with pytest.raises(SystemContractError, match=r"several systems fit .*: huginn, ouro; choose one"):
        systems.find_system(model)
