"""The figure of gap closed against rank gain."""

from __future__ import annotations

from loopq.paper.scatter import gain_scatter
from tests.support.pages import check_axes


def test_every_model_is_a_named_point_with_units():
    points = [
        {"name": "a", "gain": 7.8, "gap_closed": 1.02, "one_step_better": False},
        {"name": "b", "gain": 1.3, "gap_closed": 0.4, "one_step_better": True},
    ]
    picture = gain_scatter(points)
    check_axes(picture)
    (axes,) = picture.figure.axes
    assert [text.get_text() for text in axes.texts] == ["a", "b"]
    better, worse = axes.lines
    assert (list(better.get_xdata()), list(better.get_ydata())) == ([1.3], [40.0])
    assert (list(worse.get_xdata()), list(worse.get_ydata())) == ([7.8], [102.0])
