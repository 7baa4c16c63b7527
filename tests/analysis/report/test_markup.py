"""Pieces of a page: shades of a heat map."""

from __future__ import annotations

import json
import math
import re

import pytest

from loopq.analysis.report import markup
from loopq.analysis.report.errors import error_maps
from loopq.analysis.report.markup import Cell, Shades
from tests.analysis.report.conftest import errors


def test_what_is_not_finite_is_a_dash():
    data = errors(Q4=1.0)
    data["weights"]["Q4"]["moved"]["core.0.mlp.weight"] = [0.1, 0.1, None, None]
    assert error_maps(data, None).count("<td>-</td>") == 2


def test_shades_are_equal_ratios():
    shades = Shades.of([0.01, 0.16, None])
    assert [shades.of_value(v) for v in (0.001, 0.01, 0.0399, 0.041, 0.159, 0.16, 1.0)] == [
        0,
        0,
        3,
        3,
        6,
        6,
        6,
    ]
    # Nearly equal values have nearly equal shades.
    assert {Shades.of([0.1, 0.11]).of_value(v) for v in (0.1, 0.11)} == {6}
    assert Shades.of([0.0]).of_value(0.0) == 0
    assert Shades.of([]).of_value(1.0) == 6


def test_many_steps_are_thinned_and_said():
    data = errors(Q4=1.0)
    for rows in data["weights"]["Q4"].values():
        rows.update({name: [0.1] * 60 for name in rows})
    text = error_maps(data, None)
    assert "Error as it arrives [%], 1 step of 3 is shown" in text
    assert "<th scope=col>59</th>" in text
    assert "<th scope=col>58</th>" not in text


def test_a_page_escapes_what_it_is_given_and_holds_its_data():
    data = {"b": math.inf, "a": "</script><b>", "c": [1, math.nan]}
    text = markup.page_html("a <b>", "c & d", "<p>body</p>", data)
    assert text.count("a &lt;b&gt;") == 2
    assert "c &amp; d <a" in text
    assert "<main>\n<p>body</p>\n</main>" in text
    (stored,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert "<" not in stored
    assert json.loads(stored) == {"a": "</script><b>", "b": None, "c": [1, None]}
    plain = markup.page_html("a", "b", "")
    assert "<script" not in plain
    assert 'class="save"' not in plain


def test_pieces_escape_their_text():
    assert markup.section("n", "<t>", "<p>") == '<section id="n"><h2>&lt;t&gt;</h2>\n<p>\n</section>'
    assert markup.paragraph("<t>") == "<p>&lt;t&gt;</p>"
    assert markup.listed(["<a>", "b"]) == "<ul><li>&lt;a&gt;</li><li>b</li></ul>"
    assert 'aria-label="&lt;a&gt;">inner</div>' in markup.scroll("<a>", "inner")


def test_cells_of_numbers_sort_by_their_value():
    assert markup.number(1234.5) == Cell("1.23e+03", "number", "1234.5")
    assert markup.number(3, "d") == Cell("3", "number", "3.0")
    assert markup.number(None) == Cell("-", "number", "")
    assert markup.percent_cell(0.1234) == Cell("12.3", "number", "12.34")
    assert markup.percent_cell(None) == Cell("-", "number", "")


@pytest.mark.parametrize(("share", "width"), [(0.0, "0.0"), (0.256, "25.6"), (1.0, "100.0"), (1.5, "100.0")])
def test_a_bar_is_as_wide_as_its_share(share, width):
    assert markup.bar(share) == Cell(f'<div class="bar" style="width:{width}%"></div>', "plot", repr(share))


def test_a_share_that_is_not_finite_has_no_bar():
    assert markup.bar(math.nan) == markup.bar(math.inf) == Cell("", "plot", "")


def test_a_table_has_heads_that_span_and_rows_with_names():
    html = markup.table(
        "what", ["name", "n", "bar", "", "<x>"],
        [["<a>", markup.number(2.0), markup.bar(0.5), Cell("t"), "z"]],
    )  # fmt: skip
    heads = re.findall(r"<th scope=col([^>]*)>(.*?)</th>", html)
    assert heads == [("", "name"), (" class=number", "n"), (" colspan=2", "bar"), ("", "&lt;x&gt;")]
    cells = re.findall(r"<t([hd])([^>]*)>(.*?)</t[hd]>", html.split("<tbody>")[1])
    assert cells[0] == ("h", " scope=row", "&lt;a&gt;")
    assert cells[1] == ("d", ' class=number data-sort="2.0"', "2")
    assert cells[2][1] == ' class=plot data-sort="0.5"'
    assert cells[3:] == [("d", "", "t"), ("d", "", "z")]
    assert 'aria-label="what"' in html
    assert "soft" not in html


def test_a_table_with_a_name_can_be_sorted():
    html = markup.table("what", ["a", ""], [["x", "y"]], caption="<c>", name="t")
    assert '<p class="soft">&lt;c&gt;<span class="action"> Click a heading to sort.</span></p>' in html
    assert '<table id=t class="sortable">' in html
    assert '<th scope=col colspan=2><button type="button">a</button></th>' in html
    described = markup.described("<T>", "c", ["a"], [])
    assert described.startswith('<h3>&lt;T&gt;</h3><p class="soft">c</p>')
    assert "button" not in described


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "50"), (0.0995, "10"), (0.0994, "9.9"), (0.001, "0.1"), (0.000995, "0.1"), (0.0009, "0.09"), (1.0, "100")],
)  # fmt: skip
def test_percent_has_four_characters_at_most(value, text):
    assert markup.percent(value) == text


def test_the_legend_names_the_ends_of_each_shade():
    shades = Shades(0.01, 1.28)
    items = re.findall(r"<li class=h(\d)>(.*?)</li>", shades.legend())
    assert [n for n, _ in items] == list("0123456")
    assert items[0][1] == "under 2.0"
    assert items[1][1] == "2.0 to 4.0"
    assert items[6][1] == "64 to 128"
    assert Shades.of([0.001, 1.0]) == Shades(0.01, 1.0)
    assert Shades.of([0.5, 1.0]) == Shades(0.25, 1.0)


def test_a_map_shows_each_step_up_to_a_number_of_columns():
    shades = Shades(0.01, 1.0)
    html = markup.heat_map("t", {"<a>": [0.5, None], "b": [0.01] * 24}, shades)
    assert re.findall(r"<th scope=col>(\w+)</th>", html) == ["step", *map(str, range(24))]
    first = re.search(r"&lt;a&gt;</th>(.*?)</tr>", html)[1]
    assert first == f"<td class=h{shades.of_value(0.5)}>50</td><td>-</td>" + "<td></td>" * 22
    assert "is shown" not in html
    assert "<caption>t [%]</caption>" in html
    thin = markup.heat_map("t", {"b": [0.01] * 26}, shades)
    assert re.findall(r"<th scope=col>(\w+)</th>", thin) == ["step", *map(str, range(0, 26, 2)), "25"]
    assert "[%], 1 step of 2 is shown" in thin
