"""Tables and figures of the paper: each has one home, and a name that is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benches import paper
from benches.pages import within
from loopq.errors import ConfigError
from loopq.evaluate.stats import Interval
from loopq.paper.shown import TABLES, Claim, find

# Figures 1a to 5, Tables 1 to 26, and Algorithm 1.
LABELS = [
    *(f"Figure {n}" for n in ("1a", "1b", "2", "3", "4", "5")),
    *(f"Table {n}" for n in range(1, 27)),
    "Algorithm 1",
]


def test_every_table_and_figure_has_one_home() -> None:
    owners = {label: name for name, entry in TABLES for label in entry.labels}
    assert [label for label in LABELS if label not in owners] == []
    assert sum(len(entry.labels) for _, entry in TABLES) == len(owners), "two files claim one table"
    assert find("table-6") == find("figure-3") == find("horizon")
    with pytest.raises(ConfigError, match=r"no table 'table-99'.*horizon.*figure-1a"):
        find("table-99")


@pytest.mark.parametrize(
    ("low", "high", "n", "below", "holds"),
    [
        (0.1, 0.3, 5, False, True),
        (0.1, 0.3, 5, True, False),
        (-0.3, -0.1, 5, False, False),
        (-0.3, -0.1, 5, True, True),
        (-0.1, 0.1, 5, False, None),
        (0.0, 0.1, 5, False, None),
        (0.1, 0.3, 4, False, None),
        (0.1, 0.1, 2, True, None),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_the_other(
    low: float, high: float, n: int, below: bool, holds: bool | None
) -> None:
    interval = Interval(0.2, low, high, 0.95, "test", n)
    claim = Claim("m", "more", "numbers", interval, below=below)
    assert claim.holds is holds
    assert claim.to_json()["holds"] is holds
    assert Claim("m", "more", "numbers", None).holds is None
    for why in ("below the resolution", "p is not below 0.05"):
        assert dataclasses.replace(claim, why_open=why).holds is None
        assert f"is left open (numbers; {why})" in dataclasses.replace(claim, why_open=why).line()


def test_the_document_lists_what_the_registry_holds() -> None:
    assert within(paper.DOCUMENT, paper.MARK) == paper.table(), "run python -m benches.paper"


def test_every_table_has_a_test() -> None:
    texts = "\n".join(
        path.read_text("utf-8") for path in (Path(__file__).parent / "tables").glob("test_*.py")
    )
    assert [name for name, _ in TABLES if f'"{name}", ' not in texts] == []
