"""The look of pictures: colours, names."""

from __future__ import annotations

import sys

import pytest

from loopq.errors import MissingExtraError
from loopq.report import page, style


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
