"""Each guest is a leaf: without its folder, and without all three, the quantizer works and passes its own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.counts import GUESTS, PACKAGE
from tests.support.house import ROOT, copy_house, pytest_there, run_there
from tests.support.marks import slow_unless

#: Guests that are removed together, by the name of the case. The paper uses both others, so it goes with each.
CASES = {**{guest: tuple({guest: None, "paper": None}) for guest in GUESTS}, "all": GUESTS}
LISTED = """
import importlib.util, sys
import loopq
from loopq.cli import parser
from loopq.commands import COMMANDS
assert not any(importlib.util.find_spec(f"loopq.{guest}") for guest in sys.argv[1:])
assert parser().format_help()
print(loopq.__file__, *COMMANDS.names())
"""
USED = """
from loopq.cli import main
few = ["--n-steps", "2", "--n-prompts", "2", "--seq-len", "16"]
for words in (
    ["quantize", "huginn_small", "--out", "Q", "--preset", "fast", "--levels", "even", *few],
    ["inspect", "Q"],
    ["evaluate", "huginn_small", "Q", *few],
    ["export", "Q", "--out", "E", "--format", "compressed-tensors", "--verify", "no"],
    ["check", "huginn_small"],
):
    assert main(words) == 0, words
"""
#: Tests that use no guest: of rooms, and of code that discovers its parts in rooms.
TESTS = (
    "commands/test_options.py", "settings", "storage", "terminal", "gradients", "quantizers/test_gptq.py",
    "run/test_route.py",
)  # fmt: skip


def house_without(folder: Path, case: str, *copied: str) -> Path:
    """The repository without some guests and their tests."""
    left_out = [room / guest for guest in CASES[case] for room in (PACKAGE, ROOT / "tests")]
    return copy_house(folder, copied, left_out)


@pytest.mark.parametrize("case", CASES)
def test_commands_are_listed_without(case, tmp_path):
    house = house_without(tmp_path, case, "python")
    file, *commands = run_there(house, "-c", LISTED, *CASES[case]).split()
    assert file == f"{house / 'python' / 'loopq' / '__init__.py'}"
    assert {"quantize", "evaluate", "inspect", "export", "check"} <= set(commands)
    gone = {"runtime": "run", "analysis": "diagnose", "paper": "reproduce"}
    assert {gone[guest] for guest in GUESTS} - set(commands) == {gone[guest] for guest in CASES[case]}


@pytest.mark.parametrize("case", slow_unless(lambda case: case == "all", CASES))
def test_models_are_quantized_and_measured_without(case, tmp_path):
    house = house_without(tmp_path / "house", case, "python")
    (tmp_path / "work").mkdir()
    run_there(house, "-c", USED, at=tmp_path / "work")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_quick_tests_pass_without(case, tmp_path):
    house = house_without(tmp_path, case, "python", "tests")
    assert " passed" in pytest_there(house, "-x", *(f"tests/{name}" for name in TESTS))
