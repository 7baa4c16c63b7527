"""Rounding of parts of the loop, on the page."""

from __future__ import annotations

from tests.support.pages import check_figure, check_table


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "rollout", "injection")


def test_its_table_is_on_the_page(diagnosis):
    check_table(diagnosis, "injection", "injection")
