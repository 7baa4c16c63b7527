"""The page is complete and self-contained, safe with odd names, and right in a real browser."""

import copy
import json
import re
from html.parser import HTMLParser
from importlib import resources

import jsonschema
import pytest

from loopq.report import page
from tests.report.conftest import measured, summary
from tests.support.pages import saved


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
    found = measured(summary("broken", float("nan"), kl_95=None))
    assert saved(page.render(measured=found))["measured"]["weights"][1]["kl"] is None


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
