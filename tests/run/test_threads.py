"""Loading, quantizing and evaluating from several threads at once give the bits of one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loopq.models.load import load_model
from loopq.systems.base import Batch
from tests.support.systems import CASES, Case, open_system, prompts
from tests.support.threads import SYSTEMS, at_once, evaluated, quantized, save_folders


@pytest.mark.parametrize("name", CASES)
def test_rollouts_at_several_depths_share_a_model(name: str) -> None:
    case = CASES[name]
    system, batch = open_system(case), prompts(case)
    at_once(lambda n: system.rollout(batch, case.depths[n % len(case.depths)]).detach().numpy())


@pytest.mark.filterwarnings("ignore:not quantized")
@pytest.mark.parametrize("work", [quantized, evaluated])
@pytest.mark.parametrize("name", SYSTEMS)
def test_one_model_is_worked_on_by_several_threads(
    name: str, work: Callable[[Case], Callable[[int], Any]]
) -> None:
    at_once(work(CASES[name]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_folders(tmp_path_factory.mktemp("models"))


def test_models_are_loaded_and_run_from_several_threads(folders: dict[str, str]) -> None:
    batch = Batch(torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(0)), (0,))

    def work(number: int) -> dict[str, Any]:
        systems = {name: load_model(folder).system for name, folder in folders.items()}
        systems["streamed"] = load_model(folders["transformers"], memory=1).system
        return {name: system.rollout(batch, 2).detach().numpy() for name, system in systems.items()}

    at_once(work)


def test_a_model_read_layer_by_layer_is_shared(folders: dict[str, str]) -> None:
    loaded = load_model(folders["transformers"], memory=1)
    batch = Batch(torch.randint(3, 200, (2, 12)), (0, 1))
    at_once(lambda n: loaded.system.rollout(batch, 1 + n % 3).detach().numpy())
