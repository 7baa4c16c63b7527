"""Measure what the house rules bound: `make counts` prints each measure beside its goal, then the rooms.

A **unit** is a file that a registry finds: a grid, a system, a format, a method, a command, a section, a table of the
paper. Units may be many; each is bounded. All other product code is the **frame**. It shrinks, or a change that adds to
it takes as much away.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.house import rust

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "loopq"
MAX_ARGUMENTS = 7
#: Lines of the frame at commit 416beaa9, by this ruler copied into a checkout of it: the first measurement.
FIRST_FRAME = 34_167
#: Requirements of `import loopq`; all else from outside is an extra.
REQUIRED = {"numpy", "safetensors"}
#: Names that say where a value came from, not what it is.
VAGUE = {"found", "own", "made", "told", "some"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Module:
    """One Python file.

    Parameters
    ----------
    name : str
        Dotted name below its package.
    text : str
        Its source.
    tree : ast.Module
        The same, parsed.
    """

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

    @cached_property
    def n_code(self) -> int:
        """Lines that are neither empty, comment nor docstring."""
        quiet: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(
                node, clean=False
            ):
                quiet |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = enumerate(self.text.splitlines(), 1)
        return sum(n not in quiet and bool(s.strip()) and not s.strip().startswith("#") for n, s in lines)

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


def without_paper() -> Graph:
    """Imports between modules of the product, which never needs the paper's room."""
    return {name: imported for name, imported in import_graph().items() if name.partition(".")[0] != "paper"}


@cache
def units() -> dict[str, Module]:
    """Modules that a registry finds: they lie in its package, or in a room's package of that name, and
    register."""
    packages: dict[str, set[str]] = {}
    pattern = r"^(\w+)(?::[^=]+)? = Registry\(\s*[^,]+,\s*\"loopq\.([\w.]+)\"\s*\)"
    for module in modules():
        for registry, package in re.findall(pattern, module.text, re.MULTILINE):
            packages.setdefault(registry, set()).add(package)
    by_name = {}
    for module in modules():
        parent = module.name.rpartition(".")[0]
        known = set().union(*(packages.get(r, ()) for r in re.findall(r"\b(\w+)\.register\(", module.text)))
        # A unit may be a package, as GGUF with its architectures.
        places = {parent, parent.partition(".")[2], parent.rpartition(".")[0]} - {""}
        if places & known:
            by_name[module.name] = module
    return by_name


def frame() -> list[Module]:
    """Modules of the product that no registry finds, the paper's room apart."""
    return [m for m in modules() if m.folder != "paper" and m.name not in units()]


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
    """Circles of the package, of each crate (files, then folders), of `tools/` and of the tests' support."""
    crates = {crate: rust.file_graph(crate) for crate in rust.CRATES}
    beside = {"tools": ROOT / "tools", "tests.support": ROOT / "tests" / "support"}
    return {
        "Python modules": circles(import_graph()),
        **{f"files of {crate}": circles(graph) for crate, graph in crates.items()},
        **{f"folders of {crate}": circles(rooms(graph, "/")) for crate, graph in crates.items()},
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


def thin_seams(graph: Graph) -> list[str]:
    """Seams between neighbouring floors where a room rests on the floor below by one import alone."""
    levels = floors(rooms(graph))
    seams = []
    for below, above in pairwise(levels):
        arrows = Counter(
            (name.partition(".")[0], other.partition(".")[0]) for name in graph for other in graph[name]
        )
        thin = [f"{a} > {b}" for a in above for b in below if arrows[a, b] == 1]
        seams += [", ".join(thin)] if thin else []
    return seams


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


def lengths(of: Iterable[Module]) -> dict[str, int]:
    """Lines of every function."""
    return {f"{m.name}.{f.name}": (f.end_lineno or 0) - f.lineno + 1 for m in of for f in m.functions()}


def defined_twice() -> dict[str, list[str]]:
    """Public classes of one name in several modules of the frame."""
    places: dict[str, list[str]] = {}
    for module in frame():
        for node in module.classes():
            if not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def members(name: str) -> list[str]:
    """Methods, properties and attributes of the one class of that name, Python's own (`__init__`) apart."""
    (node,) = [c for module in modules() for c in module.classes() if c.name == name]
    named = [f.name for f in node.body if isinstance(f, Function) and not f.name.startswith("__")]
    return named + [ast.unparse(a.target) for a in node.body if isinstance(a, ast.AnnAssign)]


def hidden_imports(of: Iterable[Module]) -> list[str]:
    """Imports inside functions that are of no extra: of loopq itself, the standard library or what is required."""
    lines = []
    for module in of:
        inner = {
            n for f in module.functions() for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)
        }
        for node in sorted(inner, key=lambda n: n.lineno):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            if name.partition(".")[0] in {"loopq", *REQUIRED, *sys.stdlib_module_names}:
                lines.append(f"{module.name}:{node.lineno} {ast.unparse(node)}")
    return lines


def loose_dicts(of: Iterable[Module]) -> int:
    """Number of times that a type says nothing but "a dictionary"."""
    return sum(module.text.count("dict[str, Any]") for module in of)


def vague_names(of: Iterable[Module]) -> set[str]:
    """Variables and arguments in functions that are called by a name of `VAGUE`."""
    return {
        f"{module.name}:{node.lineno}"
        for module in of
        for function in module.functions()
        for node in ast.walk(function)
        if (isinstance(node, ast.arg) and node.arg in VAGUE)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE)
    }


def mirrored_test(name: str) -> Path | None:
    """Test file at the mirrored path of a module: `loopq/a/b.py` has `tests/a/test_b.py`."""
    *folders, last = name.split(".")
    places = [ROOT / "tests" / Path(*folders) / f"test_{last}.py"]
    if (PACKAGE / Path(*folders, last)).is_dir():
        places.append(ROOT / "tests" / Path(*folders, last) / f"test_{last}.py")
    return next((place for place in places if place.is_file()), None)


def testable() -> list[str]:
    """Modules with code."""
    return [m.name for m in modules() if m.n_code > 10 and not m.name.startswith("_")]


def without_mirrored_test() -> list[str]:
    """Modules with code and no test at the mirrored path."""
    return [name for name in testable() if mirrored_test(name) is None]


def not_imported_by_test() -> list[str]:
    """Modules that their mirrored test does not import, by their own name or by their package's."""
    names = []
    for name in testable():
        if place := mirrored_test(name):
            text = place.read_text("utf-8")
            test = Module(name, text, ast.parse(text))
            if not any(f"{used}.".startswith(f"loopq.{name}.") for used in test.imports()):
                names.append(name)
    return names


@dataclass(frozen=True)
class Measure:
    """One measure of the house, and its goal: at most `goal`, or at least where `least`."""

    what: str
    value: float
    goal: float
    least: bool = False

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.goal if self.least else self.value <= self.goal


@cache
def measures() -> tuple[Measure, ...]:
    """All measures of the house that a reading of the code gives."""
    of_units = [module.n_lines for module in units().values()]
    mirrored = 100 * (1 - len(without_mirrored_test()) / len(testable()))
    return (
        Measure("lines of the frame", sum(m.n_lines for m in frame()), int(0.85 * FIRST_FRAME)),
        Measure("lines of the longest unit", max(of_units), 450),
        Measure("lines of the longest file", max(m.n_lines for m in modules()), 450),
        Measure("lines of the longest function", max(lengths(modules()).values()), 60),
        Measure("members of LoopedSystem", len(members("LoopedSystem")), 15),
        Measure("floors of rooms", len(floors(rooms(without_paper()))), 14),
        Measure("seams held by one import", len(thin_seams(without_paper())), 5),
        *(Measure(f"circles: {where}", len(rings), 0) for where, rings in all_circles().items()),
        Measure("Python functions with more than 7 arguments", len(too_many_arguments()), 5),
        Measure("Rust functions with more than 7 arguments", len(rust.too_many_arguments(MAX_ARGUMENTS)), 4),
        Measure("dict[str, Any] in the package", loose_dicts(modules()), 250),
        Measure("imports inside functions, extras apart", len(hidden_imports(modules())), 0),
        Measure("classes defined twice in the frame", len(defined_twice()), 0),
        Measure("variables called found, own, made, told or some", len(vague_names(modules())), 0),
        Measure("% of modules with a test at the mirrored path", round(mirrored), 90, least=True),
    )


def print_rooms() -> None:
    """Print a row for each room."""
    print(
        f"\n{'room':14} {'files':>5} {'lines':>6} {'frame':>6} {'units':>6}  longest file, longest function"
    )
    for folder in sorted({module.folder for module in modules()}):
        of = [m for m in modules() if m.folder == folder]
        longest = f"{max(m.n_lines for m in of)}, {max(lengths(of).values(), default=0)}"
        in_units = sum(m.n_lines for m in of if m.name in units())
        total = sum(m.n_lines for m in of)
        print(f"{folder:14} {len(of):5} {total:6} {total - in_units:6} {in_units:6}  {longest}")


def main() -> None:
    """Print the measures, the rooms, and where the goals are missed."""
    print(f"{'measure':48} {'today':>7} {'goal':>7}")
    for m in measures():
        print(f"{m.what:48} {m.value:7,} {m.goal:7,}  {'' if m.met else 'not reached'}")
    sizes = sorted(module.n_lines for module in units().values())
    print(f"\nframe: {FIRST_FRAME:,} lines at the first measurement (416beaa9); the goal is 15 % less")
    print(f"units: {len(sizes)} of {sizes[0]} to {sizes[-1]} lines, median {median(sizes):.0f}")
    print("not read from the code: CPU seconds of `make test` (goal 720); share of mutants that the mirrored")
    print("test kills (`make mutants`, goal 70 %)")
    print_rooms()
    print(f"\nfloors: {' < '.join(' '.join(floor) for floor in floors(rooms(import_graph())))}")
    long_files = [f"{m.name} {m.n_lines}" for m in modules() if m.n_lines > 450]
    for title, lines in (
        ("files of more than 450 lines", long_files),
        ("functions of more than 60 lines", [f"{f} {n}" for f, n in lengths(modules()).items() if n > 60]),
        ("seams held by one import", thin_seams(without_paper())),
        ("circles", [one for ring in all_circles().values() for one in ring]),
        (
            "more than 7 arguments",
            [*too_many_arguments().items(), *rust.too_many_arguments(MAX_ARGUMENTS).items()],
        ),
        ("imports inside functions, extras apart", hidden_imports(modules())),
        ("classes defined twice in the frame", defined_twice().items()),
        ("variables called found, own, made, told or some", sorted(vague_names(modules()))),
        ("no test at the mirrored path", without_mirrored_test()),
        ("not imported by the mirrored test", not_imported_by_test()),
    ):
        print(f"\n{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")


if __name__ == "__main__":
    main()
