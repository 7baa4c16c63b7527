"""The look of pictures: colours, names."""

from __future__ import annotations

import re
import sys

import pytest

from loopq.analysis.report import page, style
from loopq.errors import MissingExtraError


def test_series_are_told_apart_without_colour():
    assert len({(str(dash), marker) for _, dash, marker in style.SERIES}) == len(style.SERIES)


def test_map_is_even_in_lightness():
    import matplotlib
    import numpy as np

    rgb = matplotlib.colormaps[style.MAP](np.linspace(0, 1, 64))[:, :3]
    light = rgb @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) < 0).all()


def test_a_missing_matplotlib_names_the_extra(diagnosis, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'loopq\[report\]'"):
        page.render(diagnosis)


def test_names_lose_the_path_that_all_share():
    albert = "encoder.albert_layer_groups.0.albert_layers.0."
    assert style.short_names([f"{albert}attention.query.weight", f"{albert}ffn.weight"]) == {
        f"{albert}attention.query.weight": "attention.query",
        f"{albert}ffn.weight": "ffn",
    }
    blocks = ["model.layers.0.q.weight", "model.layers.1.q.weight"]
    assert list(style.short_names(blocks).values()) == ["layers.0.q", "layers.1.q"]
    mixed = ["transformer.adapter.weight", "transformer.core.0.fc.weight"]
    assert list(style.short_names(mixed).values()) == ["adapter", "core.0.fc"]
    assert style.short_names(["a.b.weight"]) == {"a.b.weight": "a.b"}
    assert style.short_names([]) == {}


def drawn(name="pic", width=6.0):
    figure, axes = style.canvas(width, 3.0)
    style.line(axes, 3, [1, 2], [3, 4], "black one")
    axes.legend()
    return style.Picture(name, 'A "title"', "What <it> shows", figure)


def test_a_picture_is_one_element_with_ids_of_its_own():
    first, second = drawn("a").svg(), drawn("b").svg()
    assert first.startswith('<svg role="img" aria-label="A &quot;title&quot;. What &lt;it&gt; shows"')
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for text, defined in zip((first, second), ids, strict=True):
        used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
        assert used
        assert used <= defined
        assert "<metadata>" not in text
        assert "#000000" not in text
        assert "currentColor" in text
    assert first == drawn("a").svg()


def test_a_picture_wider_than_a_column_takes_the_page():
    assert not drawn(width=6.3).wide
    assert drawn(width=6.4).wide


def test_lines_repeat_their_styles_after_the_last():
    _, axes = style.canvas(3.0, 2.0)
    for index in (1, 1 + len(style.SERIES), 2):
        style.line(axes, index, [0, 1], [5, 7], f"line {index}", linewidth=3)
    first, again, other = axes.get_lines()
    assert first.get_color() == again.get_color() == style.SERIES[1][0]
    assert first.get_marker() == again.get_marker() != other.get_marker()
    assert (first.get_label(), first.get_linewidth()) == ("line 1", 3)
    assert first.get_xydata().tolist() == [[0, 5], [1, 7]]


def test_axes_are_labelled_and_count_in_whole_numbers():
    figure, axes = style.canvas(3.0, 2.0)
    style.label(axes, "x [s]", "y [m]")
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("x [s]", "y [m]", "")
    style.label(axes, "x", "y", "both")
    assert axes.get_title() == "both"
    axes.set_xlim(0, 2)
    style.whole_numbers(axes.xaxis)
    figure.canvas.draw()
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_the_style_holds_while_a_picture_is_drawn():
    import matplotlib

    before = matplotlib.rcParams["font.size"], matplotlib.rcParams["svg.hashsalt"]
    with style.styled("salt"):
        assert matplotlib.rcParams["svg.hashsalt"] == "salt"
        assert matplotlib.rcParams["lines.markersize"] == 4
    assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["svg.hashsalt"]) == before


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("transformer.core.0.fc.weight", "core.0.fc"),
        ("model.layers.0.q.weight", "layers.0.q"),
        ("module.gpt_neox.a.weight", "gpt_neox.a"),
        ("weight.a", "weight.a"),
    ],
)
def test_a_short_name_has_no_usual_prefix(name, short):
    assert style.short_name(name) == short
