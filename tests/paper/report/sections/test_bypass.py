"""An identity around the adapter, on the page."""

from __future__ import annotations

import pytest

from loopq.paper.report.sections.bypass import bypass
from tests.support.pages import check_figure


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "bypass", "bypass")


def test_two_bars_for_each_size_and_their_change():
    def row(radius, d0, d1, **more):
        return {"state": "plain", "radius": radius, "D0": d0, "D1": d1, "attenuation": 1 - d1 / d0, "p_holm": 0.02,
                "n_prompts": 7} | more  # fmt: skip

    rows = [row(0.01, 0.5, 0.25), row(0.02, 0.4, 0.5, p_holm=0.5), row(0.01, 9.0, 9.0, state="bypassed")]
    picture = bypass({"sections": {"bypass": {"rows": rows, "settings": {"n_directions": 16}}}})
    (axes,) = picture.figure.axes
    without, beside = axes.containers
    assert [bar.get_height() for bar in without] == [0.5, 0.4]
    assert [bar.get_height() for bar in beside] == [0.25, 0.5]
    # Beside each other around the tick, and apart from the next pair.
    assert [bar.get_center()[0] for bar in without] == pytest.approx([-0.2, 0.8])
    assert [bar.get_center()[0] for bar in beside] == pytest.approx([0.2, 1.2])
    assert {round(bar.get_width(), 2) for bar in (*without, *beside)} == {0.38}
    assert [(t.get_text(), t.get_position()) for t in axes.texts] == [
        ("-50 %", (0, 0.5)),
        ("+25 %", (1, 0.5)),
    ]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.01", "0.02"]
    assert axes.get_ylim()[1] > 0.6
    assert not any(line.get_visible() for line in axes.get_xgridlines())
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "without identity path",
        "with identity path",
    ]
    for words in ("same 16 small", "sign-flip p 0.5 over 7 prompts"):
        assert words in picture.caption
    assert picture.figure.get_size_inches() == pytest.approx((6.2, 3.2))
