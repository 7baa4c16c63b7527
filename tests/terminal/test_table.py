"""Tables for a terminal."""

from __future__ import annotations

import pytest

from loopq.terminal.table import render, short, size


def test_columns_of_numbers_and_dashes_are_on_the_right():
    text = render(("layer", "KL", "note"), [("a", 0.25, None), ("longer", None, "2x fewer")])
    assert text.splitlines() == [
        "layer     KL  note",
        "------  ----  --------",
        "a       0.25  -",
        "longer     -  2x fewer",
    ]


def test_a_table_without_rows_is_its_head():
    assert render(("a", "bc"), []) == "a  bc\n-  --"


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(999, "999 B"), (1000, "1.00 kB"), (2_340_000, "2.34 MB"), (5e9, "5.00 GB")]
)
def test_sizes_are_in_powers_of_ten(n_bytes, text):
    assert size(n_bytes) == text


def test_numbers_are_short_and_none_stays_none():
    assert (short(0.0123456), short(1234.5, 2), short(None)) == ("0.0123", "1.2e+03", None)
