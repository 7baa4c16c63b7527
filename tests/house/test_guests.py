"""Each guest is a leaf: without its folder, and without all three, the quantizer works and passes its own tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import loopq
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.folding import FOLDINGS, Folding
from loopq.run import INPUTS
from loopq.settings.steps import WEIGHTINGS
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
#: Settings of methods that the paper's room brings, as options and as keywords.
OF_THE_PAPER = (
    (("--method", "awq"), {"method": "awq"}),
    (("--layer", "*=>method=awq-fold"), {"method": "awq-fold"}),
    (("--inputs", "closed-loop"), {"inputs": "closed-loop"}),
    (("--inputs", "equal-rows"), {"inputs": "equal-rows"}),
    (("--set", "step_weights=balanced"), {"step_weights": "balanced"}),
    (("--set", "step_weights=alpha=1/4"), {"step_weights": "alpha=1/4"}),
)
REFUSED = """
import contextlib, io, json, sys
import loopq
from loopq.cli import main
for options, keywords in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = main(["quantize", "huginn_small", "--out", "Q", *options])
        except SystemExit as stop:
            code = stop.code
    assert code == 2, options
    assert "needs the folder loopq/paper" in said.getvalue(), said.getvalue()
    try:
        loopq.quantize("huginn_small", **keywords)
    except loopq.LoopqError as error:
        assert "needs the folder loopq/paper" in str(error), error
    else:
        raise AssertionError(keywords)
assert main(["inspect", sys.argv[2]]) == 0
try:
    loopq.export(sys.argv[2], "E", "gptq_v2")
except loopq.LoopqError as error:
    assert "needs the folder loopq/paper" in str(error), error
else:
    raise AssertionError("exported")
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


def test_methods_of_the_paper_are_refused_by_name_without_it(tmp_path):
    made = tmp_path / "made"
    loopq.quantize("huginn_small", out=made, method="awq", n_steps=2, n_prompts=2, seq_len=16)
    house = house_without(tmp_path / "house", "paper", "python")
    said = run_there(house, "-c", REFUSED, json.dumps(OF_THE_PAPER), str(made), at=tmp_path)
    assert "method 'awq' needs the folder loopq/paper" in said
    assert "system huginn, 2 steps" in said


def test_names_of_rooms_are_registered_by_them():
    for registry in (QUANTIZERS, INPUTS, FOLDINGS, WEIGHTINGS):
        of_guests = {}
        for name, entry in registry:
            room = _module_of(entry).split(".")[1]
            if room in GUESTS:
                of_guests[name] = room
        assert of_guests == dict(registry.rooms), registry.kind


def _module_of(entry) -> str:
    return (entry.find if isinstance(entry, Folding) else entry).__module__


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
