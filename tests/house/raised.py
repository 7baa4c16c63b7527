"""Which error messages a test raises: `python -m tests.house.raised [PYTEST ARGUMENTS]`, or `make raised`.

It runs the tests and notes each `raise` of the package that runs, in the tests' process and in those they start.
`messages.txt` lists all messages by their places: those that a test raises, and the few that none can raise, with the
reason. A message that is not in it has no test yet. This program adds those that it sees, so that
`python -m tests.house.raised tests/room/test_it.py` is the step after a new message and its test.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house import counts
from tests.house.hook.sitecustomize import places

HOOK = Path(__file__).parent / "hook"
LIST = Path(__file__).with_name("messages.txt")
#: Between a place and the reason why no test raises its message.
REASON = "  # "


def messages() -> dict[str, str]:
    """Each `raise` of the package that names an error, by its place, and its code. Abstract members have no message."""
    every = {
        f"{module.name or '__init__'}: {place}": ast.unparse(node)
        for module in counts.modules()
        for node, place in places(module.tree)
    }
    return {place: code for place, code in every.items() if "NotImplementedError" not in code}


def listed() -> dict[str, str]:
    """The reason why no test raises a message, by its place. It is empty if a test does."""
    parts = (line.partition(REASON) for line in LIST.read_text("utf-8").splitlines())
    return {place: reason for place, _, reason in parts}


def write(reasons: dict[str, str]) -> None:
    """Write the list, sorted."""
    lines = (f"{place}{REASON}{reason}" if reason else place for place, reason in sorted(reasons.items()))
    LIST.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def run(arguments: list[str]) -> tuple[int, set[str]]:
    """Run the tests; return the exit code, and the places that they raised."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(os.environ.get("LOOPQ_RAISED") or Path(folder) / "raised")
        path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "LOOPQ_RAISED": str(file)}
        command = [sys.executable, "-m", "pytest", *arguments]
        code = subprocess.run(command, env=environment, check=False).returncode
        return code, set(file.read_text("utf-8").splitlines()) if file.is_file() else set()


def main(arguments: list[str]) -> int:
    """Run the tests and bring the list up to date. Whole runs also tell what is listed and was not raised."""
    code, noted = run(arguments)
    texts, known = messages(), listed()
    kept = {place: known.get(place, "") for place in texts if place in known or place in noted}
    write({place: "" if place in noted else reason for place, reason in kept.items()})
    whole = not any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    missing = [
        name for name in sorted(texts.keys() - noted) if name not in known or (whole and not known[name])
    ]
    print(f"{len(texts)} messages, {len(texts.keys() & noted)} raised, {len(kept)} listed")
    for name in missing:
        print(f"  no test raises: {name}: {texts[name]}")
    return code or bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
