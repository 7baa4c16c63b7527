"""Figure 3, Tables 6 and 7: calibration horizon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq.paper.bench import Bench
from loopq.paper.compared import RTN
from loopq.paper.tables import horizon
from loopq.paper.tables.horizon import horizons
from tests.support.paper import measured_shown_and_resumed


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (32, [1, 2, 4, 8, 16, 32])]
)
def test_horizons_double_up_to_the_depth(depth: int, expected: list[int]) -> None:
    assert horizons(depth) == expected


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("horizon", huginn, tmp_path)


def test_ranks_and_errors_are_shown_by_the_steps_summed() -> None:
    right, wrong = [1.0] * 8, [0.0] * 8

    def variant(kl: float, answered: list[float]) -> dict[str, Any]:
        by_prompt = [kl * k for k in (1.0, 1.2, 0.8, 1.0, 1.0, 1.1, 0.9, 1.0)]
        return {"kl": by_prompt, "agreement": [0.5] * 8, "nll": None, "answered": answered, "n_bytes": 1000}

    result = {
        "model": "m", "output": "logits", "bytes_per_token": None, "layer": "a", "dim": 40, "horizons": [1, 2, 3],
        "ranks": [2, 3, 10], "rank_last_step": 4, "gains": [2.0, 4.0, 8.0, 4.0, 4.0],
        "variants": {
            RTN: variant(0.4, wrong), "GPTQ, 1 step": variant(0.2, wrong), "GPTQ, 2 steps": variant(0.3, wrong),
            "GPTQ, 3 steps": variant(0.1, right),
        },
    }  # fmt: skip
    shown = horizon.show([result])
    assert shown.tables[0].rows == (
        ("m", "a", "1", "2", "5.00 %", "0.2"),
        ("m", "a", "2", "3", "7.50 %", "0.3"),
        ("m", "a", "3", "10", "25.00 %", "0.1"),
    )
    grown, first, rounding, two, answers = shown.claims
    # The geometric mean of 2, 4, 8, 4 and 4.
    assert grown.found.startswith("4.00 [")
    assert [c.found[:14] for c in (first, rounding, two)] == [
        "KL ratio 0.500",
        "KL ratio 0.250",
        "KL ratio 1.500",
    ]
    assert [c.holds for c in (first, rounding, two)] == [True, True, False]
    # Eight answers decide nothing.
    assert (answers.p, answers.asked) == (pytest.approx(2 * 0.5**8), False)
    rank, error = shown.pictures()
    assert rank.figure.axes[0].get_lines()[0].get_xydata().tolist() == [[1, 2], [2, 3], [3, 10]]
    lines = {x.get_label(): x.get_xydata() for x in error.figure.axes[0].get_lines()}
    np.testing.assert_allclose(lines["GPTQ"], [[1, 0.2], [2, 0.3], [3, 0.1]])
    np.testing.assert_allclose(lines[RTN], [[1, 0.4], [2, 0.4], [3, 0.4]])
