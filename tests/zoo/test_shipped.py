"""The model that ships in the wheel: its files, and that it still uses its loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benches.zoo.measure import bits_per_byte, rows_of, state_movement
from loopq import zoo
from loopq.models.load import load_model
from loopq.systems.base import LoopedSystem

FOLDER = Path(zoo.__file__).parent / "weights" / "huginn_small"


@pytest.fixture(scope="module")
def system() -> LoopedSystem:
    return load_model("huginn_small").system


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return rows_of(zoo.evaluation_text(), 24, 129)


def test_it_is_small_enough_to_ship() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 4_000_000


def test_weights_are_on_the_float16_grid(system: LoopedSystem) -> None:
    for name, p in system.model.named_parameters():
        assert torch.equal(p, p.half().float()), name


def test_it_uses_its_loop(system: LoopedSystem, rows: np.ndarray) -> None:
    full = system.n_steps
    one, half, deep = (bits_per_byte(system, rows, n) for n in (1, full // 2, full))
    assert one - deep > 0.2
    assert half - deep > 0.01
    assert deep < 2.3


def test_the_state_still_moves_when_half_the_steps_are_done(system: LoopedSystem, rows: np.ndarray) -> None:
    moves = state_movement(system, rows, system.n_steps)
    assert len(moves) == system.n_steps
    assert moves[len(moves) // 2] > 0.05


def test_the_card_says_what_was_measured() -> None:
    measured = json.loads((FOLDER / "measured.json").read_text(encoding="utf-8"))
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert measured["accepted"]
    assert measured["gap_bits_per_byte"] > 0.2
    for bits in measured["bits_per_byte"].values():
        assert f"{bits:.3f}" in card
    assert f"{measured['n_parameters']:,} parameters" in card
    assert "ELTeC" in card
    assert "CC BY 4.0" in card
