"""Section 6.2: sizes, and time of collection."""

from __future__ import annotations

from pathlib import Path

from loopq.paper.bench import Bench
from loopq.paper.tables import size
from loopq.paper.tables.size import HUGINN, huginn_bytes
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("size", huginn, tmp_path)


def test_the_size_of_huginn_is_that_of_its_shapes() -> None:
    assert sum(rows * columns * count for rows, columns, count in HUGINN) == 1_637_222_400
    assert round(huginn_bytes(False) / 1e9, 3) == 0.845
    assert round(huginn_bytes(True) / 1e9, 3) == 0.861


def test_bytes_and_seconds_are_shown_with_their_ratios() -> None:
    def found(first: float) -> dict[str, object]:
        return {"model": "m", "dense": 4_000_000, "bytes": 1_600_000, "seconds": {"first": first, "all": 3.0}}

    paper, padded, model, quick = size.show([found(2.0), found(0.0)]).tables[0].rows
    assert paper[1:] == ("3.274 GB", "0.845 GB", "3.88", None, None, None)
    assert padded[1:4] == ("3.274 GB", "0.861 GB", "3.80")
    assert model == ("m", "4.000 MB", "1.600 MB", "2.50", "2.00", "3.00", "1.50")
    assert quick[4:] == ("0.00", "3.00", None)
