"""The paper's room is a leaf: without `loopq/paper` and its tests, the product works and passes its own tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.house import ROOT, copy_house, pytest_there, run_there

#: Quick tests of code that discovers its parts in rooms: commands, options, sections of a diagnosis, the
#: page.
QUICK = (
    "tests/test_api.py",
    "tests/commands/test_options.py",
    "tests/analysis/diagnosis/test_blindness.py",
    "tests/analysis/diagnosis/test_survey.py",
    "tests/analysis/diagnosis/test_sections.py",
)
#: Rooms with tests that run there when there is more time.
ROOMS = ("tests/settings", "tests/storage", "tests/layers", "tests/gradients", "tests/terminal")


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """The repository without the paper's room and its tests."""
    left = [ROOT / "python" / "loopq" / "paper", ROOT / "tests" / "paper"]
    return copy_house(tmp_path_factory.mktemp("house"), left_out=left)


def test_commands_are_there_without_it(house):
    code = (
        "import importlib.util, loopq, loopq.cli\n"
        "print(loopq.__file__, importlib.util.find_spec('loopq.paper'))\n"
        "from loopq.commands import COMMANDS\n"
        "print(*COMMANDS.names())\n"
        "assert loopq.cli.parser().format_help()\n"
        "loopq.cli.parser().parse_args(['demo', '--help'])\n"
    )
    place, commands, *help_of_demo = run_there(house, "-c", code).splitlines()
    assert place == f"{house / 'python' / 'loopq' / '__init__.py'} None"
    assert {"demo", "diagnose", "quantize"} <= set(commands.split())
    assert "reproduce" not in commands
    assert help_of_demo


@pytest.mark.slow
def test_the_products_quick_tests_pass_without_it(house):
    assert " passed" in pytest_there(house, "-x", *QUICK)


@pytest.mark.slow
def test_the_products_tests_import_nothing_of_it_and_rooms_pass(house):
    """All but the house's own, which hold documents against the whole repository."""
    printed = pytest_there(house, "--collect-only", "tests", "--ignore", "tests/house")
    assert int(re.search(r"(\d+)/\d+ tests collected", printed)[1]) > 3000
    assert " passed" in pytest_there(house, *ROOMS)
