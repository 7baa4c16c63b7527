"""The main table in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopq.paper import main_text
from loopq.paper.main_table import ALL, ONE, RTN
from tests.support.main_table import measure, save


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(main_text, "N_RESAMPLES", 300)


def ratios(rtn: float, one: float, first: float, width: float = 0.1) -> dict[str, dict[str, float]]:
    names = (f"{ALL} / {RTN}", f"{ALL} / {ONE}", f"{ONE} / {RTN}")
    values = zip(names, (rtn, one, first), strict=True)
    return {n: {"estimate": v, "low": v - width, "high": v + width} for n, v in values}


@pytest.mark.parametrize(
    ("given", "holds", "says"),
    [
        (ratios(0.5, 0.6, 1.4), True, "holds: N steps are better than both; one step is worse than rounding"),
        (ratios(0.5, 0.95, 0.5), False, "better than rounding and not significantly different from one step"),
        (
            ratios(1.3, 1.2, 1.0),
            False,
            "worse than rounding and worse than one step; one step is not significantly",
        ),
        (
            ratios(0.5, 1.2, 0.4),
            False,
            "better than rounding and worse than one step; one step is better than",
        ),
    ],
)
def test_the_ordering_is_said_in_words(given: Any, holds: bool, says: str) -> None:
    found = main_text.words(given, looped=True)
    assert found["holds"] is holds
    assert says in found["in_words"]


def test_training_seeds_are_put_together(tmp_path: Path) -> None:
    names = [save(tmp_path / n, "ouro", n_layers=1, total_ut_steps=2) for n in ("a", "a_seed1", "b")]
    record = main_text.summarize([measure(n) for n in names])
    assert {r["kind"] for r in record["training_seeds"]} == {"a"}
    for row in record["training_seeds"]:
        assert row["models"] == ["a", "a_seed1"]
        assert row["gap_closed"]["estimate"] == pytest.approx(np.mean(row["by_seed"]))
