"""Every trained model of the repository: its card, its size, and the document's table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benches.pages import within
from benches.zoo import WEIGHTS, overview
from benches.zoo.card import card_text
from benches.zoo.chains import chains
from benches.zoo.measure import bits_per_answer, bits_per_byte, rows_of
from loopq import zoo
from loopq.systems.load import load_model

TRAINED = sorted(p.parent for p in WEIGHTS.glob("*/measured.json"))


def test_the_folder_stays_small() -> None:
    sizes = {f.name: sum(p.stat().st_size for p in f.iterdir()) for f in TRAINED}
    assert all(size < 2_100_000 for size in sizes.values()), sizes
    assert sum(sizes.values()) < 20_000_000


@pytest.mark.parametrize("folder", TRAINED, ids=lambda f: f.name)
def test_a_trained_model_is_what_its_card_says(folder: Path) -> None:
    torch.set_num_threads(1)
    system = load_model(folder).system
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == card_text(folder.name, measured)
    assert measured["accepted"]
    full = measured["full_depth"]
    assert full == system.n_steps
    looped = measured["recipe"]["margin"] is not None
    task = measured["recipe"]["data"] == "chains"
    spent = bits_per_answer if task else bits_per_byte
    rows: np.ndarray = chains(64, 0) if task else rows_of(zoo.evaluation_text(), 432, 129)[::36]
    deep = spent(system, rows, full)
    # Another text than the card's, a small slice spread over it: the size of the number is what is checked.
    assert abs(deep - measured["bits_per_byte"][str(full)]) < 0.5
    if looped:
        assert spent(system, rows, 1) - deep > 0.2


def test_the_documents_table_is_what_was_measured() -> None:
    assert within(overview.DOCUMENT, overview.MARK) == overview.table(), "run python -m benches.zoo.overview"
