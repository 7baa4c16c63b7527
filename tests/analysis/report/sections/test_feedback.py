"""The error that the loop feeds back, on the page."""

from __future__ import annotations

import pytest

from loopq.analysis.report.sections.feedback import feedback
from tests.support.pages import check_figure


def made(layers="exposed", ratio=True):
    """Two settings with a curve each."""
    curve = {
        "lambdas": [0.0, 0.5, 1.0],
        "error": [0.01, 0.02, 0.04],
        "ratio": {"estimate": 4.0} if ratio else None,
        "n_prompts": 5,
        "n_seeds": 2,
    }
    return {
        "sections": {
            "feedback": {"settings": {"INT4": {"all": curve}, "INT8": {"all": curve}}, "layers": layers}
        }
    }


def test_each_setting_has_a_panel_of_errors_in_percent():
    picture = feedback(made())
    assert [axes.get_title() for axes in picture.figure.axes] == ["INT4", "INT8"]
    (line,) = picture.figure.axes[0].get_lines()
    assert list(line.get_xdata()) == [0.0, 0.5, 1.0]
    assert list(line.get_ydata()) == pytest.approx([1.0, 2.0, 4.0])
    assert line.get_label() == "all: x4.00"
    assert picture.figure.axes[0].get_ylim()[0] == 0
    for words in ("The exposed layers are rounded", "5 prompts, 2 initial states", "one input block alone"):
        assert words in picture.caption


def test_all_layers_lack_input_blocks_and_curves_may_lack_ratios():
    picture = feedback(made(layers="all", ratio=False))
    assert "All layers are rounded" in picture.caption
    assert "block" not in picture.caption
    assert picture.figure.axes[0].get_lines()[0].get_label() == "all"
    assert feedback({"sections": {}}) is None


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "feedback", "feedback")
