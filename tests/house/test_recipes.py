"""The recipes of CONTRIBUTING, in a copy of the repository: each unit is one file, and all of loopq then knows it."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.house import copy_house, pytest_there, run_there
from tests.support.interpreters import ROOT

pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")

NEW_MESSAGES = (
    "from tests.house import raised; print(*sorted(set(raised.messages()) - set(raised.listed())), sep='\\n')"
)
#: Where the file of each recipe goes.
PLACES = {"grid": "layers/grids", "quantizer": "quantizers", "system": "systems", "format": "formats"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with one more file for each recipe."""
    copy = copy_house(tmp_path_factory.mktemp("recipes"), ("python", "tests", "docs"))
    for name, folder in PLACES.items():
        shutil.copy(
            ROOT / "tests/support/recipes" / f"{name}.py", copy / "python/loopq" / folder / "madeup.py"
        )
    # `use.py` raises the recipes' own messages, as a unit's test would. No other message is new.
    new = run_there(copy, "-c", NEW_MESSAGES).split("\n")[:-1]
    assert new
    assert all(".madeup: " in line for line in new)
    with (copy / "tests/house/messages.txt").open("a") as listed:
        listed.writelines(f"{line}\n" for line in new)
    return copy


def test_each_unit_is_one_file_of_a_hundred_lines():
    for name in PLACES:
        text = (ROOT / "tests/support/recipes" / f"{name}.py").read_text("utf-8")
        assert len(text.splitlines()) <= 100, name


def test_units_are_listed_quantized_exported_and_inspected(copy, tmp_path):
    used = json.loads(run_there(copy, "-m", "tests.support.recipes.use", str(tmp_path)).splitlines()[-1])
    assert used["listed"] == dict.fromkeys(("level", "method", "option", "system", "format"), True)
    model, files = used["by_system"], used["by_files"]
    assert (model["system"], model["done"], model["override"]) == ("madeup", "madeup", True)
    assert set(model["ratio"]) == {2.0}
    assert model["asked"] == [{"loudness": 2.0}, "madeup"]
    assert model["written"] == "madeup_core.weight MADEUP"
    assert model["unread"] == "loudness goes with method madeup; method gptq-cd would not read it"
    assert "levels madeup have 2 bits; got 3" in model["bits"]
    assert "madeup cannot hold INT8" in model["format"]
    assert files["stored"] == {"kind": "madeup", "tint": 3, "bits": 2}
    assert files["values"] == [-1.0, 0.0, 1.0]
    assert all(files[what] for what in ("same", "inspected", "gguf", "exported"))
    assert "its codes are MADEUP" in files["refused"]
    assert "quantize with --levels even, or with the format madeup" in files["refused"]


def test_the_suites_of_units_stay_green(copy):
    """The settings' page is written anew, and the grid is entered in the suite of grids, as CONTRIBUTING says."""
    suite = copy / "tests/layers/test_grids.py"
    entry = 'MORE = {\n    "madeup": ({"tint": 3}, (2,), *ANY),\n'
    text = suite.read_text("utf-8").replace("MORE = {\n", entry, 1)
    suite.write_text(text, "utf-8")
    run_there(copy, "docs/settings.py")
    assert "`madeup`" in (copy / "docs/settings.md").read_text("utf-8")
    words = ["tests/layers/test_grids.py", "tests/house/test_docs.py"]
    chosen = "madeup or every_kind or no_field or page_of_settings"
    assert " passed" in pytest_there(copy, *words, "-k", chosen)


def test_the_units_pass_the_rules_of_the_house(copy):
    files = [f"tests/house/test_{name}.py" for name in ("counts", "messages", "house")]
    # Rules that read the package.
    rules = "counts or messages or measure or frame or mirrored or parameter or two_classes"
    assert " passed" in pytest_there(copy, *files, "-k", rules)


@pytest.mark.slow
def test_the_units_pass_every_quick_test_of_the_house(copy):
    # As CONTRIBUTING says: the page of settings lists the new names.
    run_there(copy, "docs/settings.py")
    # Tests that build wheels or copy the repository again have no part in it.
    apart = [
        f"--ignore=tests/house/test_{name}.py"
        for name in ("wheel", "toolchain", "paper_is_a_leaf", "recipes")
    ]
    assert " passed" in pytest_there(copy, "tests/house", *apart)
