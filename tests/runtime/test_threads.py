"""Generating with and loading of quantized models from several threads at once give the bits of one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loopq
from loopq.systems.base import Batch
from tests.support.generating import generated
from tests.support.systems import CASES
from tests.support.threads import OPTIONS, SYSTEMS, at_once, save_folders


@pytest.mark.parametrize("name", SYSTEMS)
def test_one_model_generates_in_several_threads(name: str) -> None:
    at_once(generated(CASES[name]))


def test_checkpoints_are_loaded_and_run_from_several_threads(tmp_path: Path) -> None:
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    checkpoints = []
    for kind, folder in save_folders(tmp_path).items():
        checkpoints.append(str(tmp_path / f"{kind}-q"))
        loopq.quantize(folder, ids.numpy(), out=checkpoints[-1], seq_len=12, **OPTIONS)

    def work(number: int) -> dict[str, Any]:
        systems = {folder: loopq.load(folder).system for folder in checkpoints}
        return {name: s.rollout(Batch(ids[:1], (0,)), 2).detach().numpy() for name, s in systems.items()}

    at_once(work)
