"""Table 21: errors in a selective scan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper import results
from loopq.paper.bench import Bench
from loopq.paper.tables import mamba
from loopq.terminal.progress import Silent


def test_a_model_without_it_is_refused_with_the_reason(huginn: Bench, tmp_path: Path) -> None:
    measured = results.make("mamba", [huginn], tmp_path, Silent())
    assert "no selective-scan layer" in measured.refused["huginn_small"]


def test_growth_and_the_identity_term_are_compared() -> None:
    def component(name: str, kind: str, start: float, late: float, growth: float | None) -> dict[str, Any]:
        return {"component": name, "perturbation": kind, "start": start, "late": late, "growth": growth}

    def alpha(value: float, relative: float) -> dict[str, Any]:
        return {
            "alpha": value, "relative": relative, "absolute": 3.0, "norm": 4.5, "largest_multiplier": 1 + value,
            "by_prompt": [relative * k for k in (1.0, 1.1, 0.9, 1.0, 1.2)],
        }  # fmt: skip

    result = {
        "model": "m",
        "components": [component("A_log", "int4", 0.125, 0.5, 4.0), component("out_proj", "int4", 0.25, 0.75, None),
                       component("out_proj", "noise", 9.0, 9.0, 1.0)],
        "alphas": [alpha(0.0, 0.5), alpha(0.25, 0.25)],
        "growth": [[0.1] * 5, [0.3] * 5],
    }  # fmt: skip
    shown = mamba.show([result])
    parts, sweep = shown.tables
    assert parts.rows[:2] == (
        ("m", "A_log", "int4", "0.125", "0.5", "4.00x"), ("m", "out_proj", "int4", "0.25", "0.75", None)
    )  # fmt: skip
    assert sweep.rows == (
        ("m", "0.00", "0.500", "+0 %", "3", "4.5", "1.00"), ("m", "0.25", "0.250", "-50 %", "3", "4.5", "1.25")
    )  # fmt: skip
    assert shown.lines == ["m: error by A_log at token 0: 0.12; by out_proj at token 32: 0.75."]
    grows, lowers = shown.claims
    assert (grows.holds, grows.found) == (True, "+20.0 percent of the state [+20.0, +20.0]")
    assert (lowers.holds, lowers.found) == (True, "error ratio 0.500 [0.500, 0.500]")
    (picture,) = shown.pictures()
    assert picture.figure.axes[0].get_lines()[0].get_xydata().tolist() == [[0, 0.5], [0.25, 0.25]]
