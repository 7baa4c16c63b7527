"""Sections of the page: which there are, axes with units."""

from __future__ import annotations

import re

from loopq.analysis.report import page
from loopq.analysis.report.sections import all_figures
from tests.support.pages import check_axes, saved


def test_every_axis_has_a_label_with_its_unit(diagnosis):
    for picture in all_figures(diagnosis):
        check_axes(picture)


def test_sections_are_those_of_what_is_known(everything, no_figures):
    sections = {
        "diagnosis": {"where", "loop", "again"},
        "weights": {"weights"},
        "errors": {"where"},
        "measured": {"cost"},
    }
    for known, there in sections.items():
        text = page.render(**{known: everything[known]})
        assert set(re.findall(r'<section id="(\w+)">', text)) == there
        assert set(re.findall(r'<li><a href="#(\w+)">', text)) == there
        assert set(saved(text)) == {known}
    whole = page.render(**everything)
    assert re.findall(r'<section id="(\w+)">', whole) == [
        "weights",
        "where",
        "cost",
        "loop",
        "again",
    ]
    assert "<h1>toy, quantized</h1>" in whole
    # Measured errors, not those that rounding would have.
    assert "No weight has been quantized yet" not in whole
    assert "a &lt;text&gt;" in whole
