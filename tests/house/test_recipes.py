"""The recipes of CONTRIBUTING, in a copy of the repository: each unit is one file, and all of loopq then knows it."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.house import copy_house, pytest_there, run_there
from tests.support.interpreters import ROOT

pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")

#: Where the file of each recipe goes.
PLACES = {"grid": "layers/grids", "quantizer": "quantizers", "system": "systems", "format": "formats"}
#: A first contribution: a function with a message that no test raises.
CONTRIBUTION = '''

def shares_of(kinds: dict[str, float]) -> dict[str, float]:
    """Shares of several kinds of text that add up to one.

    Parameters
    ----------
    kinds : dict of str to float
        A weight for each kind, none below zero.

    Returns
    -------
    dict of str to float
        The weights over their sum.

    Raises
    ------
    CalibrationError
        A weight is negative, or all are zero.
    """
    total = sum(kinds.values())
    wrong = [kind for kind, weight in kinds.items() if weight < 0]
    if wrong or total == 0:
        raise CalibrationError(
            f"weights of kinds of text must be positive; got {kinds}: mend {wrong or 'one of them'}, "
            "or leave the weights out to take each kind as often"
        )
    shares = {}
    for kind, weight in kinds.items():
        shares[kind] = weight / total
    return shares
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with one more file for each recipe, and a first contribution."""
    copy = copy_house(tmp_path_factory.mktemp("recipes"), ("python", "tests", "docs"))
    for name, folder in PLACES.items():
        shutil.copy(
            ROOT / "tests/support/recipes" / f"{name}.py", copy / "python/loopq" / folder / "madeup.py"
        )
    with (copy / "python/loopq/calibrate/mixed.py").open("a", encoding="utf-8") as module:
        module.write(CONTRIBUTION)
    return copy


def test_each_unit_is_one_file_of_a_hundred_lines():
    for name in PLACES:
        text = (ROOT / "tests/support/recipes" / f"{name}.py").read_text("utf-8")
        assert len(text.splitlines()) <= 100, name


def used(copy, folder, *parts):
    """What these parts of `use.py` print."""
    return json.loads(
        run_there(copy, "-m", "tests.support.recipes.use", str(folder), *parts).splitlines()[-1]
    )


def test_units_are_listed_and_quantized(copy, tmp_path):
    printed = used(copy, tmp_path, "listed", "by_system")
    assert printed["listed"] == dict.fromkeys(("level", "method", "option", "system", "format"), True)
    model = printed["by_system"]
    assert (model["system"], model["done"], model["override"]) == ("madeup", "madeup", True)
    assert set(model["ratio"]) == {2.0}
    assert model["asked"] == [{"loudness": 2.0}, "madeup"]
    assert model["written"] == "madeup_core.weight MADEUP"
    assert model["unread"] == "loudness goes with method madeup; method gptq-cd would not read it"
    assert "levels madeup have 2 bits; got 3" in model["bits"]
    assert "madeup cannot hold INT8" in model["format"]


@pytest.mark.slow
def test_units_are_stored_exported_and_inspected(copy, tmp_path):
    files = used(copy, tmp_path, "by_files")["by_files"]
    assert files["stored"] == {"kind": "madeup", "tint": 3, "bits": 2}
    assert files["values"] == [-1.0, 0.0, 1.0]
    assert all(files[what] for what in ("same", "inspected", "gguf", "exported"))
    assert "its codes are MADEUP" in files["refused"]
    assert "quantize with --levels even, or with the format madeup" in files["refused"]


def test_units_and_a_first_contribution_pass_the_rules(copy):
    rules = "measures or mirrored or parameter or two_classes or a_message_names"
    files = [f"tests/house/test_{name}.py" for name in ("house", "messages")]
    assert " passed" in pytest_there(copy, *files, "-k", rules)


@pytest.mark.slow
def test_the_suite_of_grids_stays_green(copy):
    """The grid is entered in the suite, as CONTRIBUTING says."""
    suite = copy / "tests/layers/test_grids.py"
    entry = 'MORE = {\n    "madeup": ({"tint": 3}, (2,), *ANY),\n'
    text = suite.read_text("utf-8").replace("MORE = {\n", entry, 1)
    suite.write_text(text, "utf-8")
    assert " passed" in pytest_there(copy, str(suite), "-k", "madeup or every_kind or no_field")


@pytest.mark.slow
def test_they_pass_every_quick_test_of_the_house(copy):
    # As CONTRIBUTING says: the page of settings lists the new names.
    run_there(copy, "docs/settings.py")
    assert "`madeup`" in (copy / "docs/settings.md").read_text("utf-8")
    # Tests that build wheels or copy the repository again have no part in it.
    apart = [f"--ignore=tests/house/test_{name}.py" for name in ("wheel", "toolchain", "guests", "recipes")]
    assert " passed" in pytest_there(copy, "tests/house", *apart)
