"""The page: whole, self-contained, safe with odd names, and right in a real browser."""

import copy
import json
import re
import sys
from html.parser import HTMLParser
from importlib import resources

import jsonschema
import pytest

from loopq.diagnose import survey
from loopq.diagnose.config import DiagnoseConfig
from loopq.diagnose.context import Context
from loopq.errors import ConfigError, MissingExtraError
from loopq.report import loopfigure, page, style
from loopq.report.sections import FIGURES, all_figures
from tests.report.conftest import check_axes, measured, summary
from tests.support.looptoys import BlindSystem, LinearLoop, tokens


@pytest.fixture(scope="module")
def text(diagnosis):
    return page.render(diagnosis)


class Outline(HTMLParser):
    """Ids, elements and what they load."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.tags, self.loads, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        if "id" in found:
            self.ids.append(found["id"])
        for key in ("src", "href", "xlink:href"):
            if found.get(key) and not found[key].startswith(("#", "data:")):
                self.loads.append(found[key])


def saved(text):
    """The data that a page offers for download."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    )


def test_page_loads_nothing_and_has_no_id_twice(everything):
    text = page.render(**everything)
    outline = Outline(text)
    assert outline.loads == []
    assert len(outline.ids) == len(set(outline.ids))
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_page_shows_the_whole_diagnosis(diagnosis, text):
    for layer in diagnosis["layers"]:
        assert layer["verdict"]["text"].split(".")[0] in text
    for line in diagnosis["summary"]:
        assert line in text
    assert f"numpy</th><td>{diagnosis['versions']['numpy']}" in text
    assert saved(text) == {"diagnosis": diagnosis}
    names = [p.name for p in all_figures(diagnosis)]
    assert names == ["loop", "ranks", "spectra", "rollout", "feedback", "ablation", "groups", "proxy"]
    assert set(names) <= set(FIGURES.names())


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr("loopq.report.diagnosis.all_figures", lambda d: [])


def test_names_are_escaped(diagnosis, no_figures):
    odd = copy.deepcopy(diagnosis)
    odd["model"]["name"] = "</script><script>alert(1)</script>"
    odd["layers"][0]["role"] = "<b>"
    text = page.render(odd)
    assert "<script>alert" not in text
    assert "<b>" not in text


def test_every_axis_has_a_label_with_its_unit(diagnosis):
    for picture in all_figures(diagnosis):
        check_axes(picture)


def test_series_are_told_apart_without_colour():
    assert len({(str(dash), marker) for _, dash, marker in style.SERIES}) == len(style.SERIES)


def test_map_is_even_in_lightness():
    import matplotlib
    import numpy as np

    rgb = matplotlib.colormaps[style.MAP](np.linspace(0, 1, 64))[:, :3]
    light = rgb @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) < 0).all()


def test_the_same_diagnosis_gives_the_same_bytes(diagnosis, text):
    # Also from a file, where keys are sorted.
    assert page.render(json.loads(json.dumps(diagnosis, sort_keys=True))) == text


def test_systems_without_steps_have_a_page_that_says_why():
    found = survey.diagnose(
        Context(
            BlindSystem(LinearLoop(width=8)),
            tokens(n_tokens=12),
            5,
            DiagnoseConfig(n_prompts=2, n_ablation_prompts=2, seeds=(0,)),
        ),
        only=["ranks", "ablation", "feedback"],
    )
    text = page.render(found)
    assert "Parts that could not run" in text
    assert "has no single-step function" in text
    assert "Every layer has an identity path" in text


def test_a_missing_matplotlib_names_the_extra(diagnosis, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'loopq\[report\]'"):
        page.render(diagnosis)


def test_sections_are_those_of_what_is_known(everything, no_figures):
    sections = {
        "diagnosis": {"where", "loop", "again"},
        "weights": {"weights"},
        "errors": {"where"},
        "measured": {"cost", "prompts"},
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
        "prompts",
        "loop",
        "again",
    ]
    assert "<h1>toy, quantized</h1>" in whole
    # Measured errors, not those that rounding would have.
    assert "No weight has been quantized yet" not in whole
    assert "a &lt;text&gt;" in whole


def test_numbers_that_are_none_are_saved_as_null():
    found = measured(summary("broken", float("nan"), kl_95=None))
    assert saved(page.render(measured=found))["measured"]["weights"][1]["kl"] is None


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


def test_other_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a diagnosis"):
        page.render({})
    with pytest.raises(ConfigError, match="version 9"):
        page.write_data({"format": "loopq-diagnosis", "version": 9}, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_data_fits_its_schema(diagnosis, tmp_path):
    schema = json.loads(resources.files("loopq.report").joinpath("schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(diagnosis, schema)
    page.write_data(diagnosis, tmp_path / "d.json")
    assert json.loads((tmp_path / "d.json").read_text("utf-8")) == diagnosis
    broken = copy.deepcopy(diagnosis)
    del broken["layers"][0]["verdict"]["text"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


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
