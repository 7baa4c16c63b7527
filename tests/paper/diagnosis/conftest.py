"""One thread of torch, as for the sections of the product."""

from __future__ import annotations

import pytest

from tests.analysis.diagnosis.conftest import one_thread
from tests.support.looptoys import LinearLoop, LinearSystem

__all__ = ["one_thread"]


@pytest.fixture
def system():
    return LinearSystem(LinearLoop())
