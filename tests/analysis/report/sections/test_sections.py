"""Sections of the page: which there are, what each draws of made-up data, and what all have of a diagnosis."""

from __future__ import annotations

import re

import pytest

from loopq.analysis.report import page
from loopq.analysis.report.sections import FIGURES, TABLES, all_figures
from loopq.analysis.report.sections.ablation import ablations
from loopq.analysis.report.sections.feedback import feedback
from loopq.analysis.report.sections.groups import group_sizes
from loopq.analysis.report.sections.injection import injection, rollout_error
from loopq.analysis.report.sections.overlap import overlaps
from loopq.analysis.report.sections.ranks import proxies, rank_map, spectra
from tests.support.pages import check_axes, check_part, parts_of, saved


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


def ablated(n=3, measure="changed", exposed=(), **rho):
    """A diagnosis of layers with damage that grows with their number; the last is the worst."""
    layers = [
        {
            "name": f"m.core.{i}.a.weight",
            "exposed": i in exposed,
            "ablation": {
                "place": n - i,
                "changed": 0.01 * i if measure == "changed" else None,
                "output_error_last": 0.02 * i,
                "per_channel": {"changed": 0.03 * i, "output_error_last": 0.04 * i},
                "setting": "INT4 g16",
            },
        }
        for i in range(n)
    ]
    places = {
        x["name"]: {"random-direction gain": i + 1, "Hessian trace": None} for i, x in enumerate(layers)
    }
    spearman = {"random-direction gain": 0.5, "Hessian trace": None} | rho
    section = {"measure": measure, "n_prompts": 7, "table": {"places": places, "spearman": spearman}}
    return {
        "sections": {"ablation": section},
        "layers": [*layers, {"name": "x", "ablation": None, "exposed": False}],
    }


@pytest.mark.parametrize(("measure", "bar", "whole"), [("changed", 1, 3), ("output error", 2, 4)])
def test_bars_are_in_percent_the_worst_at_the_top(measure, bar, whole):
    picture = ablations(ablated(measure=measure, exposed={1}))
    (axes,) = picture.figure.axes
    assert [p.get_width() for p in axes.patches] == pytest.approx([0.0, bar, 2 * bar])
    assert [p.get_hatch() for p in axes.patches] == [None, "///", None]
    (diamonds,) = axes.get_lines()
    assert list(diamonds.get_xdata()) == pytest.approx([0.0, whole, 2 * whole])
    assert [t.get_text() for t in axes.get_yticklabels()] == ["core.0.a", "core.1.a", "core.2.a"]
    assert [t.get_text() for t in axes.texts] == [f"gain {i}, trace -" for i in (1, 2, 3)]
    assert axes.texts[2].xy == (pytest.approx(2 * max(bar, whole)), 2)
    assert axes.get_xlabel().startswith("predictions changed" if measure == "changed" else "output error")
    for words in ("to INT4 g16, 7 prompts", "are +0.50 and undefined"):
        assert words in picture.caption


def test_forty_layers_are_drawn_and_no_more():
    assert len(ablations(ablated(n=40)).figure.axes[0].patches) == 40
    many = ablations(ablated(n=41)).figure.axes[0]
    assert len(many.patches) == 40
    # The one with the least damage is left out.
    assert many.get_yticklabels()[0].get_text() == "core.1.a"


def fed_back(layers="exposed", ratio=True):
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
    picture = feedback(fed_back())
    assert [axes.get_title() for axes in picture.figure.axes] == ["INT4", "INT8"]
    (line,) = picture.figure.axes[0].get_lines()
    assert list(line.get_xdata()) == [0.0, 0.5, 1.0]
    assert list(line.get_ydata()) == pytest.approx([1.0, 2.0, 4.0])
    assert line.get_label() == "all: x4.00"
    assert picture.figure.axes[0].get_ylim()[0] == 0
    for words in ("The exposed layers are rounded", "5 prompts, 2 initial states", "one input block alone"):
        assert words in picture.caption


def test_all_layers_lack_input_blocks_and_curves_may_lack_ratios():
    picture = feedback(fed_back(layers="all", ratio=False))
    assert "All layers are rounded" in picture.caption
    assert "block" not in picture.caption
    assert picture.figure.axes[0].get_lines()[0].get_label() == "all"


def of_group(size, n_steps, agreement=True):
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
    rows = [of_group(16, 8, agreement), of_group(32, 8, agreement), of_group(-1, 8, agreement)]
    (axes,) = group_sizes({"sections": {"groups": {"rows": rows}}}).figure.axes
    drawn = {x.get_label(): x.get_ydata() for x in axes.get_lines()}
    assert list(drawn) == ["after step 1", "after step 3", "after step 8"]
    for label, step in (("after step 1", 0), ("after step 3", 2), ("after step 8", 7)):
        assert drawn[label] == pytest.approx([factor * (s + step) / 10 for s in (16, 32, -1)])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["16", "32", "row"]
    assert axes.get_ylabel().startswith("same top-1" if agreement else "output error")
    assert (axes.get_ylim()[1] == 102) == agreement


def variant(factor, agreement=True):
    """One variant over three steps."""
    return {
        "steps": [1, 2, 3],
        "state_error": [0.01 * factor, 0.02 * factor, 0.03 * factor],
        "output_error": [0.5, 0.5, 0.5],
        "agreement": [0.9, 0.8, 1 - 0.1 * factor] if agreement else None,
        "final_agreement": {"low": 0.111, "high": 0.999},
        "kl": [9.0, 9.0, 0.01 * factor],
    }


def injected(output="logits", agreement=True, unpaired=None):
    """A diagnosis with two variants."""
    paired = {"none": variant(0, agreement), "all": variant(2, agreement), "exposed": variant(1, agreement)}
    runs = {"per channel": {"paired": paired, "unpaired": unpaired, "settings": {"bits": 4}}}
    return {"sections": {"injection": runs}, "model": {"output": output}}


def test_lines_are_percent_by_step_without_the_reference():
    left, right = rollout_error(injected()).figure.axes
    drawn = {x.get_label(): (list(x.get_xdata()), list(x.get_ydata())) for x in left.get_lines()}
    assert list(drawn) == ["exposed layers", "all layers"]
    assert drawn["all layers"][0] == [1, 2, 3]
    assert drawn["all layers"][1] == pytest.approx([2.0, 4.0, 6.0])
    (_, whole) = right.get_lines()
    assert list(whole.get_ydata()) == pytest.approx([90.0, 80.0, 80.0])
    assert left.get_ylim()[0] == 0
    assert right.get_ylim() == (0, 102)


def test_one_panel_without_logits_and_none_without_steps():
    assert len(rollout_error(injected(agreement=False)).figure.axes) == 1
    short = injected()
    for variant in short["sections"]["injection"]["per channel"]["paired"].values():
        variant["steps"] = [1]
    assert rollout_error(short) is None


def test_rows_have_first_last_interval_and_divergence():
    text = injection(injected(unpaired={"all": variant(3)}))
    rows = [re.findall(r">([^<>]+)</t[hd]>", row) for row in text.split("<tbody>")[1].split("</tr>")[:-1]]
    assert [row[:3] for row in rows] == [
        ["per channel", "paired", "none"],
        ["per channel", "paired", "exposed layers"],
        ["per channel", "paired", "all layers"],
        ["per channel", "unpaired", "all layers"],
    ]
    assert rows[2][3:] == ["90.0", "80.0", "11.1 to 99.9", "0.0200"]
    assert injection(injected(output="hidden")) == injection({"sections": {}}) == ""


OVERLAPS = [
    {"between": "steps 0 and 4", "k": 64, "overlap": 0.25, "chance": 0.5},
    {"between": "two initial states", "k": 16, "overlap": 0.125, "chance": 0.03},
]


def test_spaces_are_ordered_by_dimension_beside_their_chance():
    text = overlaps({"sections": {"overlap": {"overlaps": OVERLAPS}}})
    assert text.index("two initial states") < text.index("steps 0 and 4")
    for number in ("12.50", "3.00", "25.00", "50.00"):
        assert number in text


def layer(dim, ranks, whole):
    """Ranks of a layer's input by step, and spectra that halve."""
    curve = {"index": [1, 2, 4], "value": [8.0, 4.0, 0.0]}
    return {
        "dim": dim,
        "per_step": [{"step": step, "rank": rank} for step, rank in ranks.items()],
        "all": {"rank": whole},
        "spectra": {"first": curve, "last": curve | {"value": [2.0, 1.0, 0.5]}, "all": curve},
    }


def ranked(**more):
    """A diagnosis of two layers over steps 0, 2 and 4."""
    ranks = {
        "layers": {
            "m.core.0.a.weight": layer(10, {0: 2, 2: 5, 4: 10}, 10),
            "m.core.0.b.weight": layer(20, {0: 4, 4: 1200}, 20),
        },
        "threshold": 0.01,
        "drawn": ["m.core.0.b.weight"],
        "proxy_sum": {
            "grouped": {"per_step": [1.0, 3.0], "max_over_min": 3.0, "uniform_share": 0.5},
            "row": {"per_step": [2.0, 2.0], "max_over_min": None, "uniform_share": 0.5},
        },
    }
    return {"sections": {"ranks": ranks | more}}


def test_the_map_has_shares_of_the_width_and_counts():
    picture = rank_map(ranked())
    axes = picture.figure.axes[0]
    (image,) = axes.images
    assert image.get_array().filled(-1).tolist() == [[20, 50, 100, 100], [20, -1, 6000, 100]]
    assert image.get_clim() == (0, 100)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0", "2", "4", "sum"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b"]
    counts = {t.get_position(): (t.get_text(), t.get_color()) for t in axes.texts}
    assert len(counts) == 7
    assert counts[0, 0] == ("2", "#111111")
    assert counts[2, 0] == ("10", "white")
    assert counts[2, 1] == ("1,200", "white")
    assert counts[1, 0][1] == "#111111"
    assert "above 0.01 of the largest" in picture.caption


def test_a_map_of_many_steps_has_no_numbers():
    for n_steps, n_texts in ((17, 18), (18, 0)):
        layers = {"a.weight": layer(10, dict.fromkeys(range(n_steps), 3), 5)}
        assert len(rank_map(ranked(layers=layers)).figure.axes[0].texts) == n_texts


def test_spectra_are_relative_to_their_largest():
    picture = spectra(ranked())
    (axes,) = picture.figure.axes
    first, last, whole, threshold = axes.get_lines()
    assert first.get_xdata().tolist() == [1, 2, 4]
    assert first.get_ydata().tolist() == [1.0, 0.5, 1e-12]
    assert last.get_ydata().tolist() == [1.0, 0.5, 0.25]
    assert [x.get_label() for x in (first, last, whole)] == ["step 0", "last step", "sum of all steps"]
    assert threshold.get_ydata() == [0.01, 0.01]
    assert (axes.get_title(), axes.get_xscale(), axes.get_yscale()) == ("b", "log", "log")
    assert axes.get_legend() is not None


def test_proxies_are_shares_of_their_sum():
    (axes,) = proxies(ranked()).figure.axes
    drawn = {x.get_label(): list(x.get_ydata()) for x in axes.get_lines()}
    assert drawn.pop("grouped (max / min 3.00)") == [25.0, 75.0]
    assert drawn.pop("row") == [50.0, 50.0]
    assert list(drawn.values()) == [[50.0, 50.0]]
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 75.0 * 1.4


def test_nothing_is_drawn_of_what_was_not_measured():
    one = {"grouped": {"per_step": [1.0], "max_over_min": None, "uniform_share": 1.0}}
    assert proxies(ranked(proxy_sum=one)) is None


def test_counts_are_light_on_dark_cells():
    layers = {"a.weight": layer(100, {0: 54, 1: 55}, 56)}
    texts = rank_map(ranked(layers=layers)).figure.axes[0].texts
    assert [t.get_color() for t in texts] == ["#111111", "white", "white"]


@pytest.mark.parametrize("name", parts_of(FIGURES, "analysis"))
def test_a_figure_has_units_and_its_section(diagnosis, name):
    check_part(diagnosis, FIGURES, name)


@pytest.mark.parametrize("name", parts_of(TABLES, "analysis"))
def test_a_table_is_on_the_page_with_its_section(diagnosis, name):
    # The toy's state is narrower than the spaces of an overlap.
    sections = diagnosis["sections"] | {"overlap": {"overlaps": OVERLAPS}}
    check_part({**diagnosis, "sections": sections}, TABLES, name)
