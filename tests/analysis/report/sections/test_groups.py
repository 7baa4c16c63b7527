"""Group sizes, on the page."""

from __future__ import annotations

import pytest

from loopq.analysis.report.sections.groups import group_sizes
from tests.support.pages import check_figure


def row(size, n_steps, agreement=True):
    """Agreement and error of a group size, of which each step is another number."""
    share = [(size + t) / 1000 for t in range(n_steps)]
    return {
        "group_size": size,
        "steps": list(range(1, n_steps + 1)),
        "agreement": share if agreement else None,
        "output_error": [2 * s for s in share],
    }


@pytest.mark.parametrize(("agreement", "factor"), [(True, 1), (False, 2)])
def test_three_depths_are_drawn_over_the_group_sizes(agreement, factor):
    rows = [row(16, 8, agreement), row(32, 8, agreement), row(-1, 8, agreement)]
    (axes,) = group_sizes({"sections": {"groups": {"rows": rows}}}).figure.axes
    drawn = {x.get_label(): x.get_ydata() for x in axes.get_lines()}
    assert list(drawn) == ["after step 1", "after step 3", "after step 8"]
    for label, step in (("after step 1", 0), ("after step 3", 2), ("after step 8", 7)):
        assert drawn[label] == pytest.approx([factor * (s + step) / 10 for s in (16, 32, -1)])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["16", "32", "row"]
    assert axes.get_ylabel().startswith("same top-1" if agreement else "output error")
    assert (axes.get_ylim()[1] == 102) == agreement


def test_without_the_section_there_is_no_figure():
    assert group_sizes({"sections": {}}) is None


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "groups", "groups")
