"""Displacement of states, on the page."""

from __future__ import annotations

from tests.support.pages import check_figure


def test_its_figure_has_units(found):
    check_figure(found, "displacement", "displacement")
