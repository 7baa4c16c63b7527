"""Which of the quantizer's functions its daily commands enter: `python -m tests.house.reach`, or `make reach`.

The commands run on the embedded model with few prompts, in one process. A line belongs to the innermost function around
it. The share of lines in entered functions is noted for `make counts`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType

from loopq.cli import main as loopq
from tests.house import counts
from tests.house.measures import NOTED

FEW = "--n-prompts 4 --seq-len 64"
COMMANDS = (
    f"quantize huginn_small --out Q --group-size 32 {FEW}",
    f"evaluate huginn_small Q {FEW}",
    "inspect Q",
    "run Q Sea --n-tokens 4",
    f"collect huginn_small --hessian --out H {FEW}",
    # Even levels, since the engines' formats have no others.
    f"quantize huginn_small --out E --levels even --group-size 32 {FEW}",
    "export E --format compressed-tensors --out C",
    "check huginn_small",
)


def owned(module: counts.Module) -> dict[int, int]:
    """Lines of each function without those of functions inside it, by the line that its code begins in."""
    lines: dict[int, int] = {}
    for function in module.functions():
        first = min(node.lineno for node in (function, *function.decorator_list))
        lines[first] = (function.end_lineno or first) - first + 1
    starts = sorted(lines)
    ends = {first: first + n for first, n in lines.items()}
    for first in reversed(starts):
        around = [other for other in starts if other < first < ends[other]]
        if around:
            lines[around[-1]] -= ends[first] - first
    return lines


def entered(commands: tuple[str, ...]) -> dict[Path, set[int]]:
    """Run commands in an empty folder; return the first lines of the functions that they enter, by file."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            for command in commands:
                print(f"loopq {command}", file=sys.stderr)
                with contextlib.redirect_stdout(io.StringIO()):
                    if loopq(command.split()) != 0:
                        raise SystemExit(f"failed: loopq {command}")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    first_lines: dict[Path, set[int]] = {}
    for code in codes:
        first_lines.setdefault(Path(os.path.realpath(code.co_filename)), set()).add(code.co_firstlineno)
    return first_lines


def main() -> None:
    """Print the share of each room and of all, and note the latter."""
    first_lines = entered(COMMANDS)
    rooms: dict[str, list[int]] = {}
    for module in counts.quantizer():
        path = counts.PACKAGE / Path(*module.name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        lines, seen = owned(module), first_lines.get(file.resolve(), set())
        for room in (module.folder, "all"):
            total = rooms.setdefault(room, [0, 0])
            total[0] += sum(n for first, n in lines.items() if first in seen)
            total[1] += sum(lines.values())
    for room, (reached, total) in sorted(rooms.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{room:14} {reached:6} of {total:6} lines, {100 * reached / max(total, 1):3.0f} %")
    NOTED.mkdir(exist_ok=True)
    (NOTED / "reach").write_text(f"{100 * rooms['all'][0] / rooms['all'][1]:.1f}\n", "utf-8")


if __name__ == "__main__":
    main()
