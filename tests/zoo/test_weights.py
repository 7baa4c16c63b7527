"""Every trained model of the repository: its card, its size, and the document's table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benches.zoo import CARDS, WEIGHTS, folders
from benches.zoo.card import card_text
from benches.zoo.chains import chains
from benches.zoo.measure import bits_per_answer, bits_per_byte, rows_of
from loopq import zoo
from loopq.models.load import load_model
from tests.support.marks import slow_unless

FOLDERS = sorted(p.parent for place in (WEIGHTS, CARDS) for p in place.glob("*/measured.json"))


def test_the_repository_has_small_weights_alone() -> None:
    sizes = {f.name: sum(p.stat().st_size for p in f.iterdir()) for f in FOLDERS}
    assert all(size < 2_100_000 for size in sizes.values()), sizes
    assert sum(sizes.values()) < 5_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_a_card_is_made_of_what_was_measured(folder: Path) -> None:
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == card_text(folder.name, measured)
    assert measured["accepted"]


@pytest.mark.parametrize("name", slow_unless(lambda n: (WEIGHTS / n).is_dir(), [f.name for f in FOLDERS]))
def test_a_trained_model_is_what_its_card_says(name: str) -> None:
    folder = {Path(f).name: Path(f) for f in folders()}.get(name)
    if folder is None:
        pytest.skip(f"NOT RUN: {name} is not trained here; run `make zoo` or `make zoo-medium`")
    loaded = load_model(folder)
    system = loaded.system
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
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
