"""Helpers for the tests of pages."""

from __future__ import annotations

import json
import re

from loopq.analysis.report import page
from loopq.analysis.report.sections import FIGURES, TABLES


def saved(text):
    """The data that a page offers for download."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    )


def check_axes(picture):
    """Every axis has a label with its unit."""
    for axes in picture.figure.axes:
        labels = [axes.get_xlabel(), axes.get_ylabel()]
        if axes.get_label() == "<colorbar>":
            labels = [text for text in labels if text]
        assert labels, picture.name
        for text in labels:
            assert re.search(r"\[[^\]]+\]", text), (picture.name, text)


def _without(diagnosis, section):
    return {**diagnosis, "sections": {k: v for k, v in diagnosis["sections"].items() if k != section}}


def check_figure(diagnosis, name, section):
    """A figure has axes with units where a diagnosis has its section, and is left out where it has not."""
    picture = FIGURES.get(name).of(diagnosis)
    assert picture.name == name
    check_axes(picture)
    assert FIGURES.get(name).of(_without(diagnosis, section)) is None


def check_table(diagnosis, name, section):
    """A table is on the page where a diagnosis has its section, and is left out where it has not."""
    text = TABLES.get(name).of(diagnosis)
    assert "<table" in text
    assert text in page.render(diagnosis)
    assert TABLES.get(name).of(_without(diagnosis, section)) == ""
