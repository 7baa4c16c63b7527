"""The paper's room is a leaf: without `loopq/paper` and its tests, the product works and passes its own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Quick tests of what finds its parts by looking into rooms: commands, options, sections of a diagnosis, the page.
QUICK = (
    "tests/test_api.py",
    "tests/commands/test_options.py",
    "tests/diagnosis/test_blindness.py",
    "tests/diagnosis/test_survey.py",
    "tests/diagnosis/test_sections.py",
)
#: Rooms whose tests run there where there is more time.
ROOMS = ("tests/settings", "tests/storage", "tests/layers", "tests/gradients", "tests/terminal")


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """The repository without the paper's room: package and tests are copied, all else is linked."""
    folder = tmp_path_factory.mktemp("house")
    for name, paper in (("python", "python/loopq"), ("tests", "tests")):
        left = {str(ROOT / paper): ["paper"]}
        shutil.copytree(
            ROOT / name, folder / name, ignore=lambda at, names, left=left: [*left.get(at, []), "__pycache__"]
        )
    for path in ROOT.iterdir():
        if path.name not in ("python", "tests", ".git"):
            (folder / path.name).symlink_to(path)
    return folder


def run(house: Path, *args: str) -> str:
    """Run Python there; give what it printed."""
    # Threads that wait for each other take longer than the small models' work.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(house / "python"), str(house)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *args], cwd=house, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_there(house: Path, *args: str) -> str:
    """Run tests there that are not slow."""
    return run(house, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *args)


def test_commands_are_there_without_it(house):
    code = (
        "import importlib.util, loopq, loopq.cli\n"
        "print(loopq.__file__, importlib.util.find_spec('loopq.paper'))\n"
        "from loopq.commands import COMMANDS\n"
        "print(*COMMANDS.names())\n"
        "assert loopq.cli.parser().format_help()\n"
        "loopq.cli.parser().parse_args(['demo', '--help'])\n"
    )
    place, commands, *help_of_demo = run(house, "-c", code).splitlines()
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
    found = pytest_there(house, "--collect-only", "tests", "--ignore", "tests/house")
    assert int(re.search(r"(\d+)/\d+ tests collected", found)[1]) > 3000
    assert " passed" in pytest_there(house, *ROOMS)
