"""One thread of torch for every diagnosis: what they compute is then deterministic."""

from __future__ import annotations

import pytest
import torch

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.context import Context
from loopq.settings.execution import Execution
from tests.support.diagnosed import OURS, QUICK, Notes
from tests.support.looptoys import LinearLoop, LinearSystem, tokens


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def system():
    return LinearSystem(LinearLoop())


@pytest.fixture(scope="session")
def whole():
    notes = Notes()
    diagnosis = survey.diagnose(
        Context(
            LinearSystem(LinearLoop(width=8)),
            tokens(n_prompts=3, n_tokens=12),
            5,
            QUICK,
            execution=Execution(threads=1, progress=notes),
        ),
        only=OURS,
        name="toy",
    )
    return diagnosis, notes
