"""Models that the main table is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import benches.zoo.models
from benches.zoo.store import save_model
from loopq.paper import main_table
from loopq.paper.main_table import Settings
from loopq.paper.models import prepare_model

TINY = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "block_size": 64}


SMALL = Settings(n_calibration=2, n_evaluation=3, seq_len=24, n_seeds=2, n_probe=4)


def save(folder: Path, kind: str, **changes: Any) -> str:
    """Save a tiny untrained model and return its folder."""
    torch.manual_seed(0)
    save_model(benches.zoo.models.build({"model_type": f"loopq-zoo-{kind}", **TINY, **changes}), folder)
    return str(folder)


def measure(name: str, settings: Settings = SMALL) -> dict[str, Any]:
    model = prepare_model(name, main_table.sizes_of(settings))
    return main_table.measure_model(model, settings, threads=1)
