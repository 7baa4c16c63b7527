"""Rounding of parts of the loop, on the page."""

from __future__ import annotations

import re

import pytest

from loopq.analysis.report.sections.injection import injection, rollout_error
from tests.support.pages import check_figure, check_table


def run(factor, agreement=True):
    """One variant over three steps."""
    return {
        "steps": [1, 2, 3],
        "state_error": [0.01 * factor, 0.02 * factor, 0.03 * factor],
        "output_error": [0.5, 0.5, 0.5],
        "agreement": [0.9, 0.8, 1 - 0.1 * factor] if agreement else None,
        "final_agreement": {"low": 0.111, "high": 0.999},
        "kl": [9.0, 9.0, 0.01 * factor],
    }


def made(output="logits", agreement=True, unpaired=None):
    """A diagnosis with two variants."""
    paired = {"none": run(0, agreement), "all": run(2, agreement), "exposed": run(1, agreement)}
    runs = {"per channel": {"paired": paired, "unpaired": unpaired, "settings": {"bits": 4}}}
    return {"sections": {"injection": runs}, "model": {"output": output}}


def test_lines_are_percent_by_step_without_the_reference():
    left, right = rollout_error(made()).figure.axes
    drawn = {x.get_label(): (list(x.get_xdata()), list(x.get_ydata())) for x in left.get_lines()}
    assert list(drawn) == ["exposed layers", "all layers"]
    assert drawn["all layers"][0] == [1, 2, 3]
    assert drawn["all layers"][1] == pytest.approx([2.0, 4.0, 6.0])
    (_, whole) = right.get_lines()
    assert list(whole.get_ydata()) == pytest.approx([90.0, 80.0, 80.0])
    assert left.get_ylim()[0] == 0
    assert right.get_ylim() == (0, 102)


def test_one_panel_without_logits_and_none_without_steps():
    assert len(rollout_error(made(agreement=False)).figure.axes) == 1
    short = made()
    for variant in short["sections"]["injection"]["per channel"]["paired"].values():
        variant["steps"] = [1]
    assert rollout_error(short) is None
    assert rollout_error({"sections": {}}) is None


def test_rows_have_first_last_interval_and_divergence():
    text = injection(made(unpaired={"all": run(3)}))
    rows = [re.findall(r">([^<>]+)</t[hd]>", row) for row in text.split("<tbody>")[1].split("</tr>")[:-1]]
    assert [row[:3] for row in rows] == [
        ["per channel", "paired", "none"],
        ["per channel", "paired", "exposed layers"],
        ["per channel", "paired", "all layers"],
        ["per channel", "unpaired", "all layers"],
    ]
    assert rows[2][3:] == ["90.0", "80.0", "11.1 to 99.9", "0.0200"]
    assert injection(made(output="hidden")) == injection({"sections": {}}) == ""


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "rollout", "injection")


def test_its_table_is_on_the_page(diagnosis):
    check_table(diagnosis, "injection", "injection")
