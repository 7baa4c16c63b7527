"""The paper's sections on the page: what each draws of made-up data, and what all have of a diagnosis."""

from __future__ import annotations

import re

import pytest

from loopq.analysis.report import page
from loopq.analysis.report.sections import FIGURES, TABLES, all_figures, all_tables
from loopq.paper.report.sections.bypass import bypass
from loopq.paper.report.sections.displacement import displacement
from loopq.paper.report.sections.jacobian import jacobian
from loopq.paper.report.sections.perturbation import perturbations
from tests.support.pages import check_axes, check_part, parts_of


def test_every_section_is_on_the_page(diagnosis):
    pictures = all_figures(diagnosis)
    assert [p.name for p in pictures] == ["loop", "displacement", "jacobian", "bypass"]
    for picture in pictures:
        check_axes(picture)
    (table,) = all_tables(diagnosis)
    assert "output-matched noise" in table
    assert table in page.render(diagnosis)


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


def test_draws_of_a_kind_and_place_are_averaged():
    def row(kind, place, agreement, norm):
        return {
            "perturbation": kind,
            "location": place,
            "agreement": agreement,
            "output_error": 1 - agreement,
            "norm": norm,
        }

    rows = [
        row("noise", "exposed", 0.5, 1.0),
        row("noise", "core", 0.25, 2.0),
        row("noise", "exposed", 0.75, 3.0),
    ]
    for output, shares in (("logits", ["25.0", "62.5"]), ("hidden", ["75.0", "37.5"])):
        text = perturbations({"sections": {"perturbation": {"rows": rows}}, "model": {"output": output}})
        cells = [
            re.findall(r">([^<>]*)</t[hd]>", line) for line in text.split("<tbody>")[1].split("</tr>")[:2]
        ]
        assert cells == [["noise", "core", "2", "1", shares[0]], ["noise", "exposed", "2", "2", shares[1]]]
        assert ("agreement, last step" in text) == (output == "logits")


@pytest.mark.parametrize("name", parts_of(FIGURES, "paper"))
def test_a_figure_has_units_and_its_section(diagnosis, name):
    check_part(diagnosis, FIGURES, name)


@pytest.mark.parametrize("name", parts_of(TABLES, "paper"))
def test_a_table_is_on_the_page_with_its_section(diagnosis, name):
    check_part(diagnosis, TABLES, name)
