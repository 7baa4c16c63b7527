"""Fixtures shared by all tests: a tiny looped model, the path of the data folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def data_folder() -> Path:
    """Folder of data sets; tests that need it are skipped where it is not there."""
    folder = Path(os.environ.get("LOOPQ_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set LOOPQ_DATA")
    return folder


@pytest.fixture
def tiny():
    """A Huginn-like model of width 32 with random weights, depth 3, as loaded by loopq."""
    import torch

    from loopq.systems.huginn import Huginn
    from loopq.systems.load import LoadedModel, describe, encode_bytes
    from loopq.zoo.huginn import HuginnConfig, SmallHuginn

    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = HuginnConfig(n_embd=32, n_heads=2, intermediate_size=48, mean_recurrence=3)
        model = SmallHuginn(config).eval()
    return LoadedModel(
        model=model,
        system=Huginn(model),
        encode=encode_bytes,
        tokenizer=None,
        config=config.to_dict(),
        folder=None,
        config_files=(),
        report=describe(model, "tiny", "registered"),
    )


@pytest.fixture
def tiny_folder(tiny, tmp_path: Path) -> Path:
    """The tiny model as a folder."""
    from benches.zoo.store import save_model

    folder = tmp_path / "tiny-model"
    save_model(tiny.model, folder)
    return folder


@pytest.fixture
def tokens():
    """Ten prompts of 24 bytes."""
    from loopq.calibrate.data import windows
    from loopq.systems.load import encode_bytes

    text = "".join(chr(97 + (i * i + 3 * i) % 26) + (" " if i % 5 == 0 else "") for i in range(400))
    return windows(text, encode_bytes, 24, 10, "made text")
