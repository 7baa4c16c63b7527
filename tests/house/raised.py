"""Which error messages no test raises: `python -m tests.house.raised [PYTEST ARGUMENTS]`, or `make raised`.

It runs the tests, notes each `raise` of the package that runs, in the tests' process and in those they start, and
prints the others.
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


def messages() -> dict[str, str]:
    """Each `raise` of the package that names an error, by its place, and its code. Abstract members have no message."""
    every = {
        f"{module.name or '__init__'}: {place}": ast.unparse(node)
        for module in counts.modules()
        for node, place in places(module.tree)
    }
    return {place: code for place, code in every.items() if "NotImplementedError" not in code}


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
    """Run the tests and list the messages that none of them raises."""
    code, noted = run(arguments)
    texts = messages()
    print(f"{len(texts)} messages, {len(texts.keys() & noted)} raised")
    for name in sorted(texts.keys() - noted):
        print(f"  no test raises: {name}: {texts[name]}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
