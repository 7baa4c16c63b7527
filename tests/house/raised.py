"""Which error messages no test raises: `python -m tests.house.raised [PYTEST ARGUMENTS]`, or `make raised`.

It runs the tests and notes each `raise` of the package that runs, in the tests' process and in those they start.
`unraised.txt` lists the others. The list only gets shorter: a new message comes with a test.
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
LIST = Path(__file__).with_name("unraised.txt")


def messages() -> dict[str, str]:
    """Each `raise` of the package that names an error, by its place, and its code."""
    return {
        f"{module.name or '__init__'}: {place}": ast.unparse(node)
        for module in counts.modules()
        for node, place in places(module.tree)
    }


def listed() -> list[str]:
    """The places that no test is known to reach."""
    return LIST.read_text("utf-8").splitlines()


def main(arguments: list[str]) -> int:
    """Run the tests; print what none of them raised and what needs no place in the list any more."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(os.environ.get("LOOPQ_RAISED") or Path(folder) / "raised")
        path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "LOOPQ_RAISED": str(file)}
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], env=environment, check=False
        ).returncode
        raised = set(file.read_text("utf-8").splitlines()) if file.is_file() else set()
    texts, known = messages(), set(listed())
    missing = texts.keys() - raised
    print(f"{len(texts)} messages; {len(missing)} were not raised; the list has {len(known)}")
    for name in sorted(missing - known):
        print(f"  no test raises, not in {LIST.name}: {name}: {texts[name]}")
    for name in sorted(known & raised):
        print(f"  raised, take it out of {LIST.name}: {name}")
    return code or bool(missing - known or known & raised)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
