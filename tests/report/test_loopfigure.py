"""The picture of the loop."""

from __future__ import annotations

import copy

from loopq.report import loopfigure


def test_layers_are_grouped_by_block():
    names = [
        "transformer.adapter.weight",
        "model.layers.0.q_proj.weight",
        "model.layers.0.mlp.up.weight",
        "h.1.c.weight",
    ]
    found = loopfigure.blocks([{"name": n} for n in names])
    assert {k: len(v) for k, v in found.items()} == {"adapter": 1, "layers.0": 2, "h.1": 1}


def test_a_deep_stack_is_drawn_without_names(diagnosis):
    many = copy.deepcopy(diagnosis)
    one = many["layers"][1]
    many["layers"] = [one | {"name": f"model.layers.{i}.{p}.weight"} for i in range(48) for p in "qkvogud"]
    picture = loopfigure.draw(many)
    assert picture.figure.get_size_inches()[0] <= 13
    assert "layers.47" not in picture.svg()
