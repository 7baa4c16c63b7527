"""Displacement of states, on the page."""

from __future__ import annotations

import pytest

from loopq.paper.report.sections.displacement import displacement
from tests.support.pages import check_figure


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "displacement", "displacement")


def test_curves_are_in_percent_and_say_when_they_settle():
    def curve(relative, settled):
        return {"relative": relative, "n_more": len(relative), "settled_after": settled}

    settings = {"grouped": curve([0.1, 0.2, 0.2], 2), "per channel": curve([0.4, 0.5], None)}
    picture = displacement({"sections": {"displacement": {"settings": settings}}})
    (axes,) = picture.figure.axes
    first, second = axes.get_lines()
    assert first.get_label() == "per channel: still moving"
    assert second.get_label() == "grouped: settles after 2 updates"
    assert first.get_xydata().tolist() == [[1, 40], [2, 50]]
    assert second.get_xydata().tolist() == [[1, 10], [2, 20], [3, 20]]
    low, high = axes.get_ylim()
    # Room above the curves for the legend.
    assert (low, 1.3 * 50 < high < 1.5 * 50) == (0, True)
    assert axes.get_legend() is not None
    assert picture.figure.get_size_inches() == pytest.approx((6.2, 3.2))
