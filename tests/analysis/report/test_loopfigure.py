"""The picture of the loop."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from loopq.analysis.report import loopfigure
from loopq.analysis.report.style import ALARM, INK, MAP


def test_layers_are_grouped_by_block():
    names = [
        "transformer.adapter.weight",
        "model.layers.0.q_proj.weight",
        "model.layers.0.mlp.up.weight",
        "h.1.c.weight",
    ]
    groups = loopfigure.blocks([{"name": n} for n in names])
    assert {k: len(v) for k, v in groups.items()} == {"adapter": 1, "layers.0": 2, "h.1": 1}


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
    picture = two_blocks()
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


def two_blocks():
    """A block of two layers, and one of a single exposed layer."""
    return drawn(
        layer("core.0.a.weight", 0.1),
        layer("core.0.b.weight", 0.4),
        layer("core.1.a.weight", 0.2, exposed=True),
    )


def test_an_exposed_box_has_a_thick_frame_of_the_alarm():
    import matplotlib.colors

    plain, _, exposed = boxes(two_blocks())[0]
    assert exposed.get_edgecolor() == matplotlib.colors.to_rgba(ALARM)
    assert plain.get_edgecolor() == (0, 0, 0, 1)
    assert exposed.get_linewidth() > 3 * plain.get_linewidth() > 0


def test_arrows_lead_from_block_to_block_and_back():
    axes = two_blocks().figure.axes[0]
    arrows = [(t.xyann, t.xy) for t in axes.texts if getattr(t, "arrow_patch", None) is not None]
    *forth, back = [end[0] - start[0] for start, end in arrows]
    assert len(forth) == 3
    assert min(forth) > 0 > back
    assert [t.get_text() for t in axes.texts if "fed back" in t.get_text()]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["identity path around the block"]
    alone = drawn(layer("core.0.a.weight", exposed=True)).figure.axes[0]
    assert (alone.get_legend(), len(alone.get_lines())) == (None, 1)


def test_a_block_is_exposed_only_as_a_whole():
    axes = drawn(layer("core.0.a.weight", exposed=True), layer("core.0.b.weight")).figure.axes[0]
    assert "no identity path" not in {t.get_text() for t in axes.texts}
    assert len(axes.get_lines()) == 3


def test_colours_begin_at_zero_and_their_text_can_be_read():
    import matplotlib

    colours = loopfigure._Colours([0.0, 5.0, 20.0])
    shades = matplotlib.colormaps[MAP]
    for value in (0.0, 5.0, 20.0):
        assert colours.of(value)[0] == pytest.approx(shades(value / 20.0), abs=0.01)
    assert loopfigure._Colours([0.0]).of(0.0) == (shades(0.0), INK)
    assert loopfigure._Colours([]).of(1.0)[0] == shades(1.0)
    assert colours.of(None) == ("white", INK)
    for share in range(21):
        (red, green, blue, _), ink = colours.of(share)
        # Brightness of ITU-R BT.601.
        bright = np.dot((red, green, blue), (0.299, 0.587, 0.114))
        assert ink == (INK if bright > 0.5 else "white")
