"""`make build` says in one line what to install, before it does anything, where a tool is missing or too old."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Programs that the script itself and a fake tool need.
PLAIN = ("sh", "sed", "awk", "dirname")
NEW = {"python3": "Python 3.13.0rc1", "cargo": "cargo 1.95.0 (f2d3ce0bd 2026-03-21)", "cc": "cc 14"}


@pytest.fixture
def tools(tmp_path):
    """A folder with tools that print a version, and nothing else of this machine."""
    for name in PLAIN:
        (tmp_path / name).symlink_to(shutil.which(name))

    def make(**versions):
        for name, text in versions.items():
            tool = tmp_path / name
            tool.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '{text}'; exit 0\n", "utf-8")
            tool.chmod(0o755)
        return tmp_path

    return make


def check(folder, python="python3"):
    """Exit code and lines of the script where only the tools of a folder are there."""
    done = subprocess.run(
        [str(folder / "sh"), str(ROOT / "tools" / "toolchain.sh"), python],
        capture_output=True, text=True, check=False, env={"PATH": str(folder)},
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def test_one_line_says_what_to_install(tools, tmp_path):
    assert check(tools(**NEW)) == (0, [])
    old = {"python3": "Python 3.10.14", "cargo": "cargo 1.9.0"}
    code, lines = check(tools(**old))
    assert code == 1
    assert [line.partition(" or newer")[0] for line in lines] == [
        "loopq: python3 is 3.10.14: install Python 3.11",
        "loopq: cargo is 1.9.0: install Rust 1.89",
    ]
    (tmp_path / "cc").unlink()
    assert check(tmp_path)[1][-1].startswith("loopq: no C compiler")


def test_make_asks_before_it_does_anything(tools, tmp_path):
    old = tools(python3="Python 3.10.14") / "python3"
    done = subprocess.run(
        ["make", "build", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"loopq: {old} is 3.10.14: install Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()
