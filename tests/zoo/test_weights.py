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
from loopq.models.load import load_model
from tests.support.marks import slow_unless

TRAINED = sorted(p.parent for p in WEIGHTS.glob("*/measured.json"))


def test_the_folder_stays_small() -> None:
    sizes = {f.name: sum(p.stat().st_size for p in f.iterdir()) for f in TRAINED}
    small = {name: size for name, size in sizes.items() if not name.endswith("_medium")}
    assert all(size < 2_100_000 for size in small.values()), sizes
    assert sum(small.values()) < 20_000_000
    assert sum(sizes.values()) - sum(small.values()) < 40_000_000


@pytest.mark.parametrize(
    "folder", slow_unless(lambda f: "medium" not in f.name, TRAINED), ids=lambda f: f.name
)
def test_a_trained_model_is_what_its_card_says(folder: Path) -> None:
    torch.set_num_threads(1)
    loaded = load_model(folder)
    system = loaded.system
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == card_text(folder.name, measured)
    assert measured["accepted"]
    full = measured["full_depth"]
    assert full == system.n_steps
    margin, data = measured["recipe"]["margin"], measured["recipe"]["data"]

    def spent(depth: int) -> float:
        of = bits_per_answer if data == "chains" else bits_per_byte
        return of(system, rows, depth) / measured.get("bytes_per_token", 1.0)

    rows: np.ndarray = chains(64, 0) if data == "chains" else rows_of(zoo.evaluation_text(), 432, 129)[::36]
    if data == "subwords":
        ids = loaded.encode(zoo.evaluation_text().decode("ascii"))
        rows = np.array(ids[: 12 * 129]).reshape(12, 129)
    deep = spent(full)
    # Another text than the card's, a small slice spread over it: the size of the number is what is checked.
    assert abs(deep - measured["bits_per_byte"][str(full)]) < 0.5
    if margin is not None:
        assert spent(1) - deep > margin


def test_the_documents_table_is_what_was_measured() -> None:
    assert within(overview.DOCUMENT, overview.MARK) == overview.table(), "run python -m benches.zoo.overview"
