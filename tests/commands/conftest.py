"""What tests of commands share: a quantized tiny model, solved once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopq.cli import main

#: Few and short prompts.
TINY = ("--n-prompts", "6", "--seq-len", "24", "--batch-size", "2")


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch wait for each other longer than the tiny model's work takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def quantized(saved_model, tmp_path_factory) -> Path:
    """A native checkpoint of the tiny model, GPTQ, INT4 g16, for tests that only read it."""
    out = tmp_path_factory.mktemp("quantized") / "q"
    settings = ["--preset", "paper", "--group-size", "16", *TINY]
    assert main(["quantize", str(saved_model), "--out", str(out), *settings]) == 0
    return out
