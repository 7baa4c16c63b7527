"""Measure what the house rules name: `make counts` prints each measure beside its goal, then the rooms.

The package is one **quantizer** with three **guests**: folders whose removal leaves a whole product. A **unit** is a
file that a registry finds: a grid, a system, a format, a method, a command. All other code is the **frame**. A few
measures have a bound, which `test_house` holds; the others are only printed.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path

from tests.house import process, rust

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "loopq"
GUESTS = ("runtime", "analysis", "paper")
MAX_ARGUMENTS = 7
#: The command `loopq` owns its process: its streams, and what a Ctrl-C at its end prints.
PROGRAM = ("__main__", "terminal.interrupts")
#: Lines of a file and of a function: longer ones are listed. `measures` has the bounds of the longest.
LONG_FILE, LONG_FUNCTION = 400, 50
#: What a run leaves for the next `make counts`: CPU seconds of the tests, the reach of the commands.
NOTED = ROOT / ".cache"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Module:
    """One Python file: its dotted name below its package, its source, and the source parsed."""

    name: str
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        """First part of the name: the room."""
        return self.name.partition(".")[0]

    @property
    def n_lines(self) -> int:
        """All lines, with comments, docstrings and empty ones."""
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    def functions(self) -> Iterator[Function]:
        """Every function and method."""
        return (node for node in self.nodes if isinstance(node, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        """Every class."""
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def imports(self) -> Iterator[str]:
        """Names that this module imports anywhere: in functions and for type checkers too."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


def read(folder: Path) -> tuple[Module, ...]:
    """Every module below a folder."""
    parsed = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text("utf-8")
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        parsed.append(Module(name, text, ast.parse(text)))
    return tuple(parsed)


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    return read(PACKAGE)


def graph_of(package: str, of: Iterable[Module]) -> Graph:
    """Modules of a package that each of its modules imports."""
    of = tuple(of)
    names = {module.name for module in of}
    graph: Graph = {}
    for module in of:
        graph[module.name] = set()
        for imported in module.imports():
            if imported.startswith(f"{package}."):
                name = imported.removeprefix(f"{package}.")
                while name and name not in names:
                    name = name.rpartition(".")[0]
                graph[module.name] |= {name} - {"", module.name}
    return graph


@cache
def import_graph() -> Graph:
    """The same for loopq."""
    return graph_of("loopq", modules())


def rooms(graph: Graph, separator: str = ".") -> Graph:
    """The same between rooms."""
    below: Graph = {}
    for name, imported in graph.items():
        room = name.partition(separator)[0]
        below.setdefault(room, set()).update({i.partition(separator)[0] for i in imported} - {room})
    return below


def is_guests(name: str) -> bool:
    """Whether a module belongs to a guest."""
    return name.partition(".")[0] in GUESTS


def quantizer() -> list[Module]:
    """Modules of the package without its guests."""
    return [module for module in modules() if not is_guests(module.name)]


def quantizer_graph() -> Graph:
    """Imports between modules of the quantizer."""
    graph = import_graph().items()
    return {name: {i for i in imported if not is_guests(i)} for name, imported in graph if not is_guests(name)}


def ties() -> list[str]:
    """Imports of a guest by the quantizer."""
    imports = ((m.name, other) for m in quantizer() for other in sorted(import_graph()[m.name]))
    return [f"{name} > {other}" for name, other in imports if is_guests(other)]


@cache
def units() -> dict[str, str]:
    """Modules that a registry finds, with the registry's name: they lie in its package, or in a room's package of
    that name, and register."""
    packages: dict[str, set[str]] = {}
    pattern = r"^(\w+)(?::[^=]+)? = Registry\(\s*[^,]+,\s*\"loopq\.([\w.]+)\"\s*\)"
    for module in modules():
        for registry, package in re.findall(pattern, module.text, re.MULTILINE):
            packages.setdefault(registry, set()).add(package)
    by_name = {}
    for module in modules():
        parent = module.name.rpartition(".")[0]
        # A unit may be a package, as GGUF with its architectures.
        places = {parent, parent.partition(".")[2], parent.rpartition(".")[0]} - {""}
        for registry in re.findall(r"\b(\w+)\.register\(", module.text):
            if places & packages.get(registry, set()):
                by_name[module.name] = registry
    return by_name


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of two or more nodes that reach each other (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    rings: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                rings.append(sorted(part))

    for node in graph:
        if node not in index:
            visit(node)
    return rings


@cache
def all_circles() -> dict[str, list[list[str]]]:
    """Circles of the package, of the core (files, then folders), of `tools/` and of the tests' support."""
    beside = {"tools": ROOT / "tools", "tests.support": ROOT / "tests" / "support"}
    return {
        "Python modules": circles(import_graph()),
        "files of the core": circles(rust.file_graph()),
        "folders of the core": circles(rooms(rust.file_graph(), "/")),
        **{name: circles(graph_of(name, read(folder))) for name, folder in beside.items()},
    }


def floors(graph: Graph) -> list[list[str]]:
    """Rooms by floor: those that import none of the others first.

    Raises
    ------
    ValueError
        Rooms import each other.
    """
    below: list[list[str]] = []
    done: set[str] = set()
    while len(done) < len(graph):
        free = [name for name in graph if name not in done and graph[name] & set(graph) <= done]
        if not free:
            raise ValueError(f"rooms import each other: {sorted(set(graph) - done)}")
        below.append(sorted(free))
        done |= set(free)
    return below


def n_arguments(function: Function) -> int:
    """Arguments without `self`, `cls`, `*args` and `**kwargs`."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def too_many_arguments() -> dict[str, int]:
    """Functions of the package with more than seven arguments."""
    return {
        f"{module.name}.{function.name}": n_arguments(function)
        for module in modules()
        for function in module.functions()
        if n_arguments(function) > MAX_ARGUMENTS
    }


def replacements() -> list[str]:
    """Attributes and settings of the process that the package replaces."""
    library = (module for module in modules() if module.name not in PROGRAM)
    return [f"{module.name}: {change}" for module in library for change in process.replaced(module.tree)]


def lengths(of: Iterable[Module]) -> dict[str, int]:
    """Lines of every function."""
    return {f"{m.name}.{f.name}": (f.end_lineno or 0) - f.lineno + 1 for m in of for f in m.functions()}


def mirrored_test(name: str) -> Path | None:
    """Test file at the mirrored path of a module: `loopq/a/b.py` has `tests/a/test_b.py`. A unit without such a file
    is tested by a suite that goes through its registry, in the mirrored folder."""
    *folders, last = name.split(".")
    places = [ROOT / "tests" / Path(*folders) / f"test_{last}.py"]
    if (PACKAGE / Path(*folders, last)).is_dir():
        places.append(ROOT / "tests" / Path(*folders, last) / f"test_{last}.py")
    if name in units():
        suites = sorted((ROOT / "tests" / Path(*folders)).glob("test_*.py"))
        places += [s for s in suites if re.search(rf"\b{units()[name]}\b", s.read_text("utf-8"))]
    return next((place for place in places if place.is_file()), None)


def testable() -> list[str]:
    """Modules that define something."""
    named = [m for m in modules() if not m.name.startswith("_")]
    return [m.name for m in named if any(m.functions()) or any(m.classes())]


def without_mirrored_test() -> list[str]:
    """Modules that define something and have no test at the mirrored path."""
    return [name for name in testable() if mirrored_test(name) is None]


def test_lines() -> int:
    """Lines of every Python and Rust file of the tests."""
    files = chain((ROOT / "tests").rglob("*.py"), (ROOT / "tests").rglob("*.rs"))
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def n_options() -> int:
    """Options that `loopq quantize --help-all` lists, `--help` apart."""
    from loopq.cli import parser

    (commands,) = parser()._subparsers._group_actions  # type: ignore[union-attr]
    actions = commands.choices["quantize"]._actions  # type: ignore[union-attr, index]
    return sum(bool(action.option_strings) and "--help" not in action.option_strings for action in actions)


def megabytes() -> float | None:
    """Size of the files of the last commit in 10^6 bytes; none outside a checkout."""
    done = subprocess.run(
        ["git", "ls-tree", "-r", "-l", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return sum(float(size) for size in re.findall(r"(?m)^\S+ blob \S+ +(\d+)", done.stdout)) / 1e6 or None


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
        value = "-" if self.value is None else f"{self.value:,.4g}" if self.value < 100 else f"{self.value:,.0f}"
        bound = "" if self.bound is None else f"{self.bound:g}"
        return f"{self.what:46} {value:>7} {self.goal:7,} {bound:>5}  {'' if reached else 'not reached'}".rstrip()


@cache
def bounded() -> tuple[Measure, ...]:
    """Measures with a bound."""
    return (
        Measure("imports of a guest by the quantizer", len(ties()), 0, 22),
        *(Measure(f"circles: {where}", len(rings), 0, 0) for where, rings in all_circles().items()),
        Measure("Python functions with more than 7 arguments", len(too_many_arguments()), 5, 5),
        Measure("Rust functions with more than 7 arguments", len(rust.too_many_arguments(MAX_ARGUMENTS)), 4, 4),
        Measure("attributes of the process that are replaced", len(replacements()), 0, 0),
        Measure("lines of the longest file", max(m.n_lines for m in modules()), LONG_FILE, 600),
        Measure("lines of the longest function", max(lengths(modules()).values()), LONG_FUNCTION, 100),
    )


def printed() -> tuple[Measure, ...]:
    """Measures that are only printed."""
    graph = rooms(quantizer_graph())
    mirrored = 100 * (1 - len(without_mirrored_test()) / len(testable()))
    return (
        Measure("lines of the quantizer", sum(m.n_lines for m in quantizer()), 31_000),
        Measure("of it frame", sum(m.n_lines for m in quantizer() if m.name not in units()), 23_000),
        Measure("rooms of the quantizer: folders", sum((PACKAGE / room).is_dir() for room in graph), 16),
        Measure("the same, and files beside them", len(graph), 16),
        Measure("floors of these", len(floors(graph)), 9),
        Measure("options of `quantize --help-all`", n_options(), 45),
        Measure("% of function lines that daily commands enter", reached(), 55, least=True),
        Measure("% of modules with a test at the mirrored path", round(mirrored), 90, least=True),
        Measure("lines of tests", test_lines(), 45_000),
        Measure("CPU s of `make test`, kernels apart", seconds("test-rust", "test-py"), 500),
        Measure("CPU s of `make house`", seconds("house"), 30),
        Measure("MB of the files of HEAD", megabytes(), 10),
    )


def print_rooms(title: str, of: Iterable[Module]) -> None:
    """Print a row for each room of these modules, and their sum."""
    by_room: dict[str, list[Module]] = {title: list(of)}
    for module in by_room[title]:
        by_room.setdefault(module.folder, []).append(module)
    print(f"\n{'room':14} {'files':>5} {'lines':>6} {'frame':>6} {'units':>6}  longest file, longest function")
    for room, within in sorted(by_room.items(), key=lambda item: (item[0] == title, item[0])):
        in_units = sum(m.n_lines for m in within if m.name in units())
        total = sum(m.n_lines for m in within)
        longest = f"{max(m.n_lines for m in within)}, {max(lengths(within).values(), default=0)}"
        print(f"{room:14} {len(within):5} {total:6} {total - in_units:6} {in_units:6}  {longest}")


def main() -> None:
    """Print the measures, the rooms, and where the goals are missed."""
    print(f"{'measure':46} {'today':>7} {'goal':>7} {'bound':>5}")
    for measure in (*bounded(), *printed()):
        print(measure)
    print("`make test`, `make house` and `make reach` note what stands as - until they have run")
    print_rooms("the quantizer", quantizer())
    print_rooms("the guests", [module for module in modules() if is_guests(module.name)])
    print(f"\nfloors: {' < '.join(' '.join(floor) for floor in floors(rooms(quantizer_graph())))}")
    long_files = [f"{m.name} {m.n_lines}" for m in modules() if m.n_lines > LONG_FILE]
    long_functions = [f"{name} {n}" for name, n in lengths(modules()).items() if n > LONG_FUNCTION]
    many = [*too_many_arguments().items(), *rust.too_many_arguments(MAX_ARGUMENTS).items()]
    for title, lines in (
        ("imports of a guest by the quantizer", ties()),
        (f"files of more than {LONG_FILE} lines", long_files),
        (f"functions of more than {LONG_FUNCTION} lines", long_functions),
        ("circles", [ring for rings in all_circles().values() for ring in rings]),
        (f"more than {MAX_ARGUMENTS} arguments", many),
        ("attributes of the process that are replaced", replacements()),
        ("no test at the mirrored path", without_mirrored_test()),
    ):
        print(f"\n{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")


if __name__ == "__main__":
    main()
