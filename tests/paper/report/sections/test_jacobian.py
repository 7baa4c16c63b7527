"""Spectral radii of a step, on the page."""

from __future__ import annotations

import pytest

from loopq.paper.report.sections.jacobian import jacobian
from tests.support.pages import check_figure


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "jacobian", "jacobian")


def test_each_accepted_estimate_is_a_dot_over_its_map():
    def entry(state="plain", **radii):
        maps = {name: {"radius": abs(r), "accepted": r > 0} for name, r in radii.items()}
        return {"state": state, "maps": maps}

    acceptance = {"n_accepted": 3, "n_maps": 4, "largest_residual": 1e-5, "largest_disagreement": 2e-4}
    prompts = [
        entry(changed=0.9, reference=0.5),
        entry(changed=-3.0, reference=0.7),
        entry("bypassed", reference=9.0),
    ]
    picture = jacobian({"sections": {"jacobian": {"prompts": prompts, "acceptance": acceptance}}})
    (axes,) = picture.figure.axes
    reference, rounded, one = axes.get_lines()
    assert list(reference.get_ydata()) == [0.5, 0.7]
    # Two dots at a third and two thirds of half a unit, one in the middle.
    assert list(reference.get_xdata()) == pytest.approx([-1 / 12, 1 / 12])
    assert (list(rounded.get_xdata()), list(rounded.get_ydata())) == ([1.0], [0.9])
    assert list(one.get_ydata()) == [1.0, 1.0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["reference", "rounded"]
    assert axes.get_xlim() == (-0.5, 1.5)
    low, high = axes.get_ylim()
    assert (low, 1.09 < high < 1.2) == (0, True)
    (note,) = axes.texts
    assert note.xy == (-0.4, 1.0)
    for words in ("3 of 4 estimates", "residual is 1.0e-05", "start vectors 2.0e-04"):
        assert words in picture.caption
    assert picture.figure.get_size_inches() == pytest.approx((6.2, 3.4))
