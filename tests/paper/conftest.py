"""Small models that the paper's tables are made of, and a diagnosis with the paper's sections."""

from __future__ import annotations

import pytest
import torch

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.paper import compared, main_text
from loopq.paper.bench import Bench
from loopq.settings.execution import Execution
from tests.support.looptoys import LinearLoop, LinearSystem, tokens
from tests.support.paper import bench

CONFIG = DiagnoseConfig(n_prompts=2, n_jacobian_prompts=2, seeds=(0,), n_directions=4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread of torch, few resamples of an interval."""
    torch.set_num_threads(1)
    for module in (compared, main_text):
        monkeypatch.setattr(module, "N_RESAMPLES", 300)


@pytest.fixture(scope="session")
def huginn() -> Bench:
    """The embedded model at small settings; what was collected of it is shared."""
    return bench("huginn_small")


@pytest.fixture(scope="session")
def diagnosis():
    """A diagnosis of the linear toy: the paper's sections alone."""
    return survey.diagnose(
        Context(
            LinearSystem(LinearLoop(width=8)),
            tokens(n_prompts=3, n_tokens=12),
            5,
            CONFIG,
            execution=Execution(threads=1),
        ),
        only=["displacement", "perturbation", "jacobian", "bypass"],
    )
