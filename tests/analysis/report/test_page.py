"""The page is complete and self-contained, safe with odd names, and right in a real browser."""

import copy
import json
import re
from html.parser import HTMLParser
from importlib import resources

import jsonschema
import pytest

from loopq.analysis.report import page
from tests.analysis.report.conftest import measured, summary
from tests.support.pages import saved


class Outline(HTMLParser):
    """Ids, elements and what they load."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.tags, self.loads, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        for key in ("src", "href", "xlink:href"):
            if attributes.get(key) and not attributes[key].startswith(("#", "data:")):
                self.loads.append(attributes[key])


def test_page_loads_nothing_and_has_no_id_twice(everything):
    text = page.render(**everything)
    outline = Outline(text)
    assert outline.loads == []
    assert len(outline.ids) == len(set(outline.ids))
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_names_are_escaped(diagnosis, no_figures):
    odd = copy.deepcopy(diagnosis)
    odd["model"]["name"] = "</script><script>alert(1)</script>"
    odd["layers"][0]["role"] = "<b>"
    text = page.render(odd)
    assert "<script>alert" not in text
    assert "<b>" not in text


@pytest.mark.slow
def test_the_same_diagnosis_gives_the_same_bytes(diagnosis, text):
    # Also from a file, where keys are sorted.
    assert page.render(json.loads(json.dumps(diagnosis, sort_keys=True))) == text


def test_numbers_that_are_none_are_saved_as_null():
    data = measured(summary("broken", float("nan"), kl_95=None))
    assert saved(page.render(measured=data))["measured"]["weights"][1]["kl"] is None


def test_data_fits_its_schema(diagnosis, tmp_path):
    schema = json.loads(resources.files("loopq.analysis.report").joinpath("schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(diagnosis, schema)
    page.write_data(diagnosis, tmp_path / "d.json")
    assert json.loads((tmp_path / "d.json").read_text("utf-8")) == diagnosis
    broken = copy.deepcopy(diagnosis)
    del broken["layers"][0]["verdict"]["text"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def test_the_title_names_the_model_and_what_was_done(diagnosis):
    assert page._title(None, {"Q": []}, None) == "Model, quantized"
    assert page._title(diagnosis, None, None) == "Diagnosis of toy <&>"
    assert page._title(diagnosis, {"Q": []}, None) == "toy <&>, quantized"
    assert page._title(diagnosis, None, {"model": "other"}) == "other, quantized"


def test_the_intro_tells_texts_warnings_and_sizes(diagnosis):
    assert page._intro(None, None) == ""
    data = measured(summary("Q", 0.5, warning="seen before"), summary("R", 0.5))
    data["on"] = data["on"] | {"n_tokens": 12_345}
    text = page._intro(None, data)
    for words in ("on 3 prompts, 12,345 tokens of a <text>, 3 steps", "of each: 1,", "Q: seen before."):
        assert words in text
    assert "Diagnosed" not in text
    model = diagnosis["model"]
    intro = page._intro({**diagnosis, "model": model | {"n_parameters": 1_234_567}}, None)
    assert (
        f"system {model['system']}, {model['n_steps']} steps, 1,234,567 parameters, {model['dtype']}; "
        in intro
    )
    assert intro.endswith(f"{diagnosis['data']['n_tokens']:,} tokens of {diagnosis['data']['source']}.")
    assert "parameters" not in page._intro({**diagnosis, "model": model | {"n_parameters": None}}, None)


def test_a_page_has_the_sections_of_what_is_given():
    text = page.render(measured=measured(summary("Q", 0.5)))
    assert re.findall(r'<section id="(\w+)">', text) == ["cost"]
    assert re.findall(r'<a href="#(\w+)">', text) == ["cost"]
    assert set(saved(text)) == {"measured"}
