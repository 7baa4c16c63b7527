"""Ranks, spectra and proxies, on the page."""

from __future__ import annotations

import pytest

from loopq.analysis.report.sections.ranks import proxies, rank_map, spectra
from tests.support.pages import check_figure


def layer(dim, ranks, whole):
    """Ranks of a layer's input by step, and spectra that halve."""
    curve = {"index": [1, 2, 4], "value": [8.0, 4.0, 0.0]}
    return {
        "dim": dim,
        "per_step": [{"step": step, "rank": rank} for step, rank in ranks.items()],
        "all": {"rank": whole},
        "spectra": {"first": curve, "last": curve | {"value": [2.0, 1.0, 0.5]}, "all": curve},
    }


def made(**more):
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
    picture = rank_map(made())
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
        assert len(rank_map(made(layers=layers)).figure.axes[0].texts) == n_texts


def test_spectra_are_relative_to_their_largest():
    picture = spectra(made())
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
    (axes,) = proxies(made()).figure.axes
    drawn = {x.get_label(): list(x.get_ydata()) for x in axes.get_lines()}
    assert drawn.pop("grouped (max / min 3.00)") == [25.0, 75.0]
    assert drawn.pop("row") == [50.0, 50.0]
    assert list(drawn.values()) == [[50.0, 50.0]]
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 75.0 * 1.4


def test_nothing_is_drawn_of_what_was_not_measured():
    one = {"grouped": {"per_step": [1.0], "max_over_min": None, "uniform_share": 1.0}}
    assert proxies(made(proxy_sum=one)) is None
    for part in (rank_map, spectra, proxies):
        assert part({"sections": {}}) is None


@pytest.mark.parametrize("name", ["ranks", "spectra", "proxy"])
def test_its_figures_have_units(diagnosis, name):
    check_figure(diagnosis, name, "ranks")


@pytest.mark.parametrize(
    ("n_layers", "n_steps", "size"), [(1, 2, (5.5, 3.4)), (10, 6, (7.5, 4.5)), (2, 40, (13.0, 3.4))]
)
def test_the_map_grows_with_steps_and_layers(n_layers, n_steps, size):
    layers = {f"c.{i}.a.weight": layer(10, dict.fromkeys(range(n_steps), 3), 5) for i in range(n_layers)}
    figure = rank_map(made(layers=layers)).figure
    assert figure.get_size_inches() == pytest.approx(size)
    axes, bar = figure.axes
    # A line before the column of the sum, which is no step.
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == [n_steps - 0.5] * 2
    assert line.get_linewidth() == 2
    assert not any(grid.get_visible() for grid in axes.get_xgridlines())
    assert bar.get_ylabel() == "directions above the threshold [% of the width]"


def test_counts_are_light_on_dark_cells():
    layers = {"a.weight": layer(100, {0: 54, 1: 55}, 56)}
    texts = rank_map(made(layers=layers)).figure.axes[0].texts
    assert [t.get_color() for t in texts] == ["#111111", "white", "white"]
    assert {(t.get_ha(), t.get_va(), t.get_fontsize()) for t in texts} == {("center", "center", 8)}


def test_thresholds_are_thin_dotted_lines():
    (axes,) = spectra(made()).figure.axes
    line = axes.get_lines()[-1]
    assert (line.get_linestyle(), line.get_linewidth()) == (":", 1)
    (note,) = [t for t in axes.texts if t.get_text() == "0.01"]
    assert note.xy == (1, 0.01)
    assert [x.get_markevery() for x in axes.get_lines()[:3]] == [0.2] * 3
    (axes,) = proxies(made()).figure.axes
    assert axes.get_lines()[-1].get_linewidth() == 1
    assert axes.get_legend() is not None
    assert axes.figure.get_size_inches() == pytest.approx((6.2, 3.2))
