"""A copy of the repository, where a test may add, remove or change files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_house(
    folder: Path, copied: Collection[str] = ("python", "tests"), left_out: Collection[Path] = ()
) -> Path:
    """Copy some folders of the repository and link everything else; `left_out` is in neither.

    Compiled files go along: they are read where time and size of their source are the same.
    """

    def ignored(at: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(at, name) in left_out]

    folder.mkdir(exist_ok=True)
    for name in copied:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.name not in (*copied, ".git", ".cache"):
            (folder / path.name).symlink_to(path)
    return folder


def run_there(house: Path, *args: str, at: Path | None = None) -> str:
    """Run Python in a copy, or with it in another folder; give what it printed."""
    # Threads that wait for each other take longer than the small models' work.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(house / "python"), str(house)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *args], cwd=at or house, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_there(house: Path, *args: str) -> str:
    """Run tests in a copy that are not slow."""
    return run_there(house, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *args)
