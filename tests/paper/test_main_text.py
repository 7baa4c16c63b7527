"""The main table in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopq.paper import main_text
from loopq.paper.compared import closer
from loopq.paper.main_text import ALL, ONE, RTN
from tests.support.paper import main_table, save


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(main_text, "N_RESAMPLES", 300)


def variants(rtn: float, one: float, steps: float, noise: float = 0.1) -> dict[str, dict[str, Any]]:
    base = np.linspace(0.5, 1.5, 24)
    spread = {ALL: np.cos(np.arange(24)), ONE: np.sin(np.arange(24)), RTN: 0.0}
    kl = {RTN: rtn, ONE: one, ALL: steps}
    return {n: {"kl": [(k * base * (1 + noise * spread[n])).tolist()]} for n, k in kl.items()}


@pytest.mark.parametrize(
    ("given", "holds", "says"),
    [
        (variants(1, 1.5, 0.5), True, "holds: N steps are better than both; one step is worse than rounding"),
        (variants(1, 0.5, 0.49), None, "better than rounding and not significantly different from one step"),
        (variants(1, 1, 1.3), False, "worse than rounding and worse than one step; one step is not signif"),
        (
            variants(1, 0.4, 0.5),
            False,
            "better than rounding and worse than one step; one step is better than",
        ),
        (
            variants(1e-5, 3e-5, 2e-5),
            None,
            "is left open: N steps are not significantly different from rounding",
        ),
    ],
)
def test_the_ordering_is_said_in_words(given: Any, holds: bool | None, says: str) -> None:
    claims = main_text.comparisons("m", given)
    found = main_text.words(claims)
    assert found["holds"] is holds
    assert says in found["in_words"]
    # Table 6 compares the same numbers, and so has the same verdict.
    one, steps = (given[name]["kl"][0] for name in (ONE, ALL))
    assert claims[f"{ALL} / {ONE}"].holds is closer("m", "", steps, one).holds


@pytest.mark.slow
def test_training_seeds_are_put_together(tmp_path: Path) -> None:
    names = [save(tmp_path / n, "ouro", n_layers=1, total_ut_steps=2) for n in ("a", "a_seed1", "b")]
    record = main_text.summarize([main_table(n) for n in names])
    assert {r["kind"] for r in record["training_seeds"]} == {"a"}
    for row in record["training_seeds"]:
        assert row["models"] == ["a", "a_seed1"]
        assert row["gap_closed"]["estimate"] == pytest.approx(np.mean(row["by_seed"]))
