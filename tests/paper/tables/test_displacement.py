"""Appendices H and L: displacement and its prediction."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from loopq.paper.tables import displacement
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("displacement", huginn, tmp_path)


def test_a_prediction_may_be_off_by_a_factor() -> None:
    def prompt(measured: float, linear: float, bound: float | None) -> dict[str, float | None]:
        return {"measured": measured, "linear": linear, "defect": 1.0, "modulus": 0.5, "bound": bound}

    good = [
        prompt(1.0, 1.25, 2.0),
        prompt(2.0, 1.6, 1.0),
        *[prompt(1.0, 1.25, 2.0)] * 4,
        prompt(0.0, 1.0, None),
    ]
    shown = displacement.show(
        [{"model": "m", "rows": {"per channel": good, "grouped": [prompt(4.0, 1.0, None)] * 5}}]
    )
    assert shown.tables[0].rows == (
        ("m", "per channel", "1", "1.26", "1", "0.5", "1.83 (6)"), ("m", "grouped", "4", "1", "1", "0.5", None)
    )  # fmt: skip
    within, kept, off = shown.claims
    # Too large and too small by a quarter are equally wrong.
    assert (within.holds, within.found) == (True, "off by 1.25 [1.25, 1.25]")
    assert kept.found == "5 of 6 prompts"
    assert (off.holds, off.found) == (False, "off by 4.00 [4.00, 4.00]")
    one = displacement.show([{"model": "m", "rows": {"grouped": [prompt(4.0, 1.0, None)]}}])
    assert one.claims == []
