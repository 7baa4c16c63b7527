"""What tests of commands share: a quantized tiny model, solved once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benches.zoo.chains  # noqa: F401  registers the letter task
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


@pytest.fixture
def data(tmp_path):
    """A handful of items of three tasks."""
    items = {
        "lambada/lambada_test.jsonl": [
            {"text": f"He said that the {w}"} for w in ("sea", "sun", "day", "end")
        ],
        "arc/arc_easy_test.jsonl": [
            {"query": f"Question: {q}?", "choices": ["one", "two", "it is none of them"], "gold": g}
            for q, g in (("How many", 0), ("Which", 1), ("What", 2))
        ],
    }
    for name, records in items.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "data" / "wikitext2").mkdir()
    (tmp_path / "data" / "wikitext2" / "wiki.test.raw").write_text(
        " = A = \n It was . \n = B = \n So be it . \n"
    )
    return tmp_path / "data"
