"""Every measure of the house beside its goal, then the rooms: `make counts`.

A few measures have a bound, which `test_house` holds. The others are only printed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain

from tests.house import counts, rust

#: Lines of a file and of a function: longer ones are listed.
LONG_FILE, LONG_FUNCTION = 400, 50
#: What a run leaves for the next `make counts`: CPU seconds of the tests, the reach of the commands.
NOTED = counts.ROOT / ".cache"


def test_lines() -> int:
    """Lines of every Python and Rust file of the tests."""
    files = chain((counts.ROOT / "tests").rglob("*.py"), (counts.ROOT / "tests").rglob("*.rs"))
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def n_options() -> int:
    """Options that `loopq quantize --help-all` lists, `--help` apart."""
    from loopq.cli import parser

    (commands,) = parser()._subparsers._group_actions  # type: ignore[union-attr]
    actions = commands.choices["quantize"]._actions  # type: ignore[union-attr, index]
    return sum(bool(action.option_strings) and "--help" not in action.option_strings for action in actions)


def megabytes(ending: str = "") -> float | None:
    """Size of the files of the last commit in 10^6 bytes, all or those with an ending; none outside a checkout."""
    done = subprocess.run(
        ["git", "ls-tree", "-r", "-l", "HEAD"], cwd=counts.ROOT, capture_output=True, text=True, check=False
    )
    return (
        sum(float(size) for size in re.findall(rf"(?m)^\S+ blob \S+ +(\d+)\t.*{ending}$", done.stdout)) / 1e6
        or None
    )


def seconds(*targets: str) -> float | None:
    """CPU seconds that these targets of make took when they last ran: what the shell's `times` printed."""
    files = [NOTED / f"{target}.times" for target in targets]
    if not all(file.is_file() for file in files):
        return None
    # The last line is of the shell's children.
    lines = [file.read_text("utf-8").splitlines()[-1] for file in files]
    return sum(60 * int(m) + float(s) for line in lines for m, s in re.findall(r"(\d+)m([\d.]+)s", line))


def reached() -> float | None:
    """The share that `make reach` found when it last ran, in percent."""
    file = NOTED / "reach"
    return float(file.read_text("utf-8")) if file.is_file() else None


@dataclass(frozen=True)
class Measure:
    """One measure of the house, its goal, and the bound that turns a test red, if it has one. It has no value where
    the run that notes it has not been made."""

    what: str
    value: float | None
    goal: float
    bound: float | None = None
    least: bool = False

    def __str__(self) -> str:
        reached = self.value is None or (self.value >= self.goal if self.least else self.value <= self.goal)
        value = (
            "-" if self.value is None else f"{self.value:,.4g}" if self.value < 100 else f"{self.value:,.0f}"
        )
        bound = "" if self.bound is None else f"{self.bound:g}"
        return f"{self.what:46} {value:>7} {self.goal:7,} {bound:>5}  {'' if reached else 'not reached'}".rstrip()


@cache
def bounded() -> tuple[Measure, ...]:
    """Measures with a bound."""
    return (
        Measure("imports of a guest by the quantizer", len(counts.ties()), 0, 0),
        *(Measure(f"circles: {where}", len(rings), 0, 0) for where, rings in counts.all_circles().items()),
        Measure("Python functions with more than 7 arguments", len(counts.too_many_arguments()), 5, 5),
        Measure(
            "Rust functions with more than 7 arguments",
            len(rust.too_many_arguments(counts.MAX_ARGUMENTS)),
            4,
            4,
        ),
        Measure("attributes of the process that are replaced", len(counts.replacements()), 0, 0),
        Measure("lines of the longest file", max(m.n_lines for m in counts.modules()), LONG_FILE, 600),
        Measure(
            "lines of the longest function",
            max(counts.lengths(counts.modules()).values()),
            LONG_FUNCTION,
            100,
        ),
    )


def printed() -> tuple[Measure, ...]:
    """Measures that are only printed."""
    graph = counts.rooms(counts.quantizer_graph())
    weights = megabytes(r"\.safetensors(?:\.xz)?") or 0
    mirrored = 100 * (1 - len(counts.without_mirrored_test()) / len(counts.testable()))
    return (
        Measure("lines of the quantizer", sum(m.n_lines for m in counts.quantizer()), 31_000),
        Measure(
            "of it frame", sum(m.n_lines for m in counts.quantizer() if m.name not in counts.units()), 23_000
        ),
        Measure(
            "rooms of the quantizer: folders", sum((counts.PACKAGE / room).is_dir() for room in graph), 16
        ),
        Measure("the same, and files beside them", len(graph), 16),
        Measure("floors of these", len(counts.floors(graph)), 9),
        Measure("options of `quantize --help-all`", n_options(), 45),
        Measure("% of function lines that daily commands enter", reached(), 55, least=True),
        Measure("% of modules with a test at the mirrored path", round(mirrored), 90, least=True),
        Measure("lines of tests", test_lines(), 45_000),
        Measure("CPU s of `make test`, kernels apart", seconds("test-rust", "test-py"), 500),
        Measure("CPU s of `make house`", seconds("house"), 30),
        Measure(f"MB of the files of HEAD, weights {weights:.1f}", megabytes(), 10),
    )


def print_rooms(title: str, of: Iterable[counts.Module]) -> None:
    """Print a row for each room of these modules, and their sum."""
    by_room: dict[str, list[counts.Module]] = {title: list(of)}
    for module in by_room[title]:
        by_room.setdefault(module.folder, []).append(module)
    print(
        f"\n{'room':14} {'files':>5} {'lines':>6} {'frame':>6} {'units':>6}  longest file, longest function"
    )
    for room, within in sorted(by_room.items(), key=lambda item: (item[0] == title, item[0])):
        in_units = sum(m.n_lines for m in within if m.name in counts.units())
        total = sum(m.n_lines for m in within)
        longest = f"{max(m.n_lines for m in within)}, {max(counts.lengths(within).values(), default=0)}"
        print(f"{room:14} {len(within):5} {total:6} {total - in_units:6} {in_units:6}  {longest}")


def main() -> None:
    """Print the measures, the rooms, and where the goals are missed."""
    print(f"{'measure':46} {'today':>7} {'goal':>7} {'bound':>5}")
    for measure in (*bounded(), *printed()):
        print(measure)
    print("`make test`, `make house` and `make reach` note what stands as - until they have run")
    print_rooms("the quantizer", counts.quantizer())
    print_rooms("the guests", [module for module in counts.modules() if counts.is_guests(module.name)])
    floors = counts.floors(counts.rooms(counts.quantizer_graph()))
    print(f"\nfloors: {' < '.join(' '.join(floor) for floor in floors)}")
    long_files = [f"{m.name} {m.n_lines}" for m in counts.modules() if m.n_lines > LONG_FILE]
    long_functions = [
        f"{name} {n}" for name, n in counts.lengths(counts.modules()).items() if n > LONG_FUNCTION
    ]
    many = [*counts.too_many_arguments().items(), *rust.too_many_arguments(counts.MAX_ARGUMENTS).items()]
    for title, lines in (
        ("imports of a guest by the quantizer", counts.ties()),
        (f"files of more than {LONG_FILE} lines", long_files),
        (f"functions of more than {LONG_FUNCTION} lines", long_functions),
        ("circles", [ring for rings in counts.all_circles().values() for ring in rings]),
        (f"more than {counts.MAX_ARGUMENTS} arguments", many),
        ("attributes of the process that are replaced", counts.replacements()),
        ("no test at the mirrored path", counts.without_mirrored_test()),
    ):
        print(f"\n{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")


if __name__ == "__main__":
    main()
