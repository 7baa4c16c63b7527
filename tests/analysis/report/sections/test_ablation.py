"""The cost of each layer on the page."""

from __future__ import annotations

import pytest

from loopq.analysis.report.sections.ablation import ablations
from tests.support.pages import check_figure


def made(n=3, measure="changed", exposed=(), **rho):
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
    picture = ablations(made(measure=measure, exposed={1}))
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
    assert len(ablations(made(n=40)).figure.axes[0].patches) == 40
    many = ablations(made(n=41)).figure.axes[0]
    assert len(many.patches) == 40
    # The one with the least damage is left out.
    assert many.get_yticklabels()[0].get_text() == "core.1.a"
    assert ablations({"sections": {}}) is None


def test_its_figure_has_units(diagnosis):
    check_figure(diagnosis, "ablation", "ablation")
