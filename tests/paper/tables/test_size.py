"""Section 6.2: sizes, and time of collection."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from loopq.paper.tables.size import HUGINN, huginn_bytes
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("size", huginn, tmp_path)


def test_the_size_of_huginn_is_that_of_its_shapes() -> None:
    assert sum(rows * columns * count for rows, columns, count in HUGINN) == 1_637_222_400
    assert round(huginn_bytes(False) / 1e9, 3) == 0.845
    assert round(huginn_bytes(True) / 1e9, 3) == 0.861
