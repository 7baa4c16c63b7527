"""Every trained model of the checkout: its card, its size, and the document's table."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from loopq import zoo  # noqa: E402
from loopq.zoo.chains import chains  # noqa: E402
from loopq.zoo.measure import bits_per_byte  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "benches" / "zoo" / "weights"
TRAINED = sorted(p.parent for p in WEIGHTS.glob("*/measured.json"))


def test_the_folder_stays_small() -> None:
    sizes = {f.name: sum(p.stat().st_size for p in f.iterdir()) for f in TRAINED}
    assert all(size < 2_100_000 for size in sizes.values()), sizes
    assert sum(sizes.values()) < 20_000_000


@pytest.mark.parametrize("folder", TRAINED, ids=lambda f: f.name)
def test_a_trained_model_is_what_its_card_says(folder: Path) -> None:
    torch.set_num_threads(1)
    model = zoo.load(folder.name)
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    assert measured["accepted"]
    full = measured["full_depth"]
    assert full == model.config.n_steps
    looped = measured["recipe"]["margin"] is not None
    task = measured["recipe"]["data"] == "chains"
    rows: np.ndarray = chains(64, 0) if task else zoo.batches(zoo.evaluation_text(), 432, 129)[::36]
    deep = bits_per_byte(model, rows, full)
    # Another text than the card's, a small slice spread over it: the size of the number is what is checked.
    assert abs(deep - measured["bits_per_byte"][str(full)]) < 0.5
    if looped:
        assert bits_per_byte(model, rows, 1) - deep > 0.2


def test_the_documents_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benches" / "zoo"))
    overview = importlib.import_module("overview")
    text = overview.DOCUMENT.read_text(encoding="utf-8")
    between = re.search(f"{overview.BEGIN}\n(.*)\n{overview.END}", text, re.DOTALL)
    assert between is not None
    assert between[1] == overview.table(), "run python benches/zoo/overview.py"
