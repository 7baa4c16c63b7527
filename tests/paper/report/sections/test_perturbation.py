"""Perturbations other than rounding, on the page."""

from __future__ import annotations

from tests.support.pages import check_table


def test_its_table_is_on_the_page(found):
    check_table(found, "perturbation", "perturbation")
