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


def layer(name, changed=None, error=None, exposed=False):
    ablation = (
        {"changed": changed, "output_error_last": error} if changed is not None or error is not None else None
    )
    return {"name": name, "ablation": ablation, "exposed": exposed}


def drawn(*layers, n_steps=4):
    return loopfigure.draw({"layers": layers, "model": {"n_steps": n_steps}})


def boxes(picture):
    axes = picture.figure.axes[0]
    return axes.patches, [text.get_text() for text in axes.texts]


def test_damage_is_in_percent_of_predictions_or_of_the_output():
    assert loopfigure.damage(layer("a", changed=0.25, error=0.5)) == 25.0
    assert loopfigure.damage(layer("a", error=0.5)) == 50.0
    assert loopfigure.damage(layer("a", changed=0.0, error=0.5)) == 0.0
    assert loopfigure.damage(layer("a")) is None


def test_each_layer_is_a_box_and_the_worst_is_the_darkest():
    picture = drawn(
        layer("core.0.a.weight", 0.1),
        layer("core.0.b.weight", 0.4),
        layer("core.1.a.weight", 0.2, exposed=True),
    )
    patches, texts = boxes(picture)
    assert len(patches) == 3
    light = [sum(patch.get_facecolor()[:3]) for patch in patches]
    assert light[1] < light[2] < light[0]
    assert [patch.get_hatch() for patch in patches] == [None, None, "///"]
    # Two boxes above each other, the next block to their right.
    x, y = zip(*(patch.get_center() for patch in patches), strict=True)
    assert x[0] == x[1] < x[2]
    assert y[0] == y[1] + 1
    assert {"a", "b", "core.0", "core.1", "no identity path"} <= set(texts)
    assert texts.count("no identity path") == 1
    assert "applied 4 times" in picture.caption
    assert "Hatched boxes" in picture.caption
    assert picture.figure.axes[1].get_ylabel() == "predictions changed, rounded alone [%]"


def test_what_was_not_measured_is_white_and_has_no_scale():
    picture = drawn(layer("core.0.a.weight"), layer("core.1.a.weight"))
    patches, texts = boxes(picture)
    assert {patch.get_facecolor()[:3] for patch in patches} == {(1.0, 1.0, 1.0)}
    assert len(picture.figure.axes) == 1
    assert "White boxes were not measured." in picture.caption
    assert "Every layer has an identity path around it." in picture.caption
    assert "no identity path" not in texts


def test_without_logits_the_scale_is_the_error_of_the_output():
    picture = drawn(layer("core.0.a.weight", error=0.1), layer("core.1.a.weight", error=0.2))
    assert picture.figure.axes[1].get_ylabel() == "output error, rounded alone [%]"
    assert "White boxes" not in picture.caption


def test_nine_blocks_have_no_names_and_eight_have():
    for n, named in ((8, True), (9, False)):
        picture = drawn(*(layer(f"core.{i}.a.weight", 0.1, exposed=True) for i in range(n)))
        _, texts = boxes(picture)
        assert ("core.0" in texts) == named
        assert ("no identity path" in texts) == named
