"""Helpers for the tests of pages."""

from __future__ import annotations

import json
import re

from loopq.analysis.report import page
from loopq.analysis.report.sections import FIGURES


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


def parts_of(registry, guest):
    """Names of the parts that a guest registers. The picture of the loop is there without any section."""
    return [n for n, part in registry if part.of.__module__.startswith(f"loopq.{guest}.") and n != "loop"]


def check_part(diagnosis, registry, name):
    """A part is there where a diagnosis has its section, with units or on the page, and left out where it has not."""
    part = registry.get(name)
    section = part.of.__module__.rpartition(".")[2]
    made, absent = part.of(diagnosis), part.of(_without(diagnosis, section))
    if registry is FIGURES:
        assert (made.name, absent) == (name, None)
        check_axes(made)
    else:
        assert "<table" in made
        assert made in page.render(diagnosis)
        assert absent == ""
