"""Measure what the house rules bound: `python tests/house/counts.py` prints the measures, then a row for each room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "loopq"
CORE = ROOT / "rust" / "loopq-core" / "src"
#: The way of a weight from the command line to a file.
TRUNK = (
    "api",
    "cli",
    "commands",
    "run",
    "quantizers",
    "gradients",
    "calibrate",
    "formats",
    "layers",
    "storage",
    "settings",
)
MAX_ARGUMENTS = 7
#: Names that stand for one class each.
ONE_CLASS = ("Grid", "Layer", "Format", "Layout")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Module:
    """One file of the package.

    Parameters
    ----------
    name : str
        Dotted name below ``loopq``.
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

    @property
    def n_code(self) -> int:
        """Lines that are neither empty, comment nor docstring."""
        quiet: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(
                node, clean=False
            ):
                quiet |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = enumerate(self.text.splitlines(), 1)
        return sum(n not in quiet and bool(s.strip()) and not s.strip().startswith("#") for n, s in lines)

    def functions(self) -> Iterator[Function]:
        """Every function and method."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def imports(self) -> Iterator[str]:
        """Modules of the package that this one names anywhere: in functions and for type checkers too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "loopq":
                for alias in node.names:
                    yield f"{node.module}.{alias.name}".removeprefix("loopq").strip(".")


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text("utf-8")
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found.append(Module(name, text, ast.parse(text)))
    return tuple(found)


@cache
def import_graph() -> Graph:
    """Modules that each module imports."""
    names = {module.name for module in modules()}
    graph: Graph = {}
    for module in modules():
        graph[module.name] = set()
        for imported in module.imports():
            while imported and imported not in names:
                imported = imported.rpartition(".")[0]
            graph[module.name] |= {imported} - {"", module.name}
    return graph


def rooms(graph: Graph) -> Graph:
    """The same between rooms."""
    found: Graph = {}
    for name, imported in graph.items():
        room = name.partition(".")[0]
        found.setdefault(room, set()).update({i.partition(".")[0] for i in imported} - {room})
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of two or more nodes that reach each other (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

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
                found.append(sorted(part))

    for node in graph:
        if node not in index:
            visit(node)
    return found


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


def classes(name: str) -> tuple[list[str], list[str]]:
    """Files of the package, and files of the core, that define a class or a struct of that name."""
    python = [
        module.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    rust = [
        str(path.relative_to(CORE))
        for path in sorted(CORE.rglob("*.rs"))
        if re.search(rf"^\s*pub(?:\([a-z]+\))? (?:struct|enum|trait) {name}\b", path.read_text("utf-8"), re.M)
    ]
    return python, rust


def without_mirrored_test() -> list[str]:
    """Modules with code whose test is not at the mirrored path."""
    missing = []
    for module in modules():
        if module.n_code <= 10 or module.name.startswith("_"):
            continue
        *folders, last = module.name.split(".")
        places = [ROOT / "tests" / Path(*folders) / f"test_{last}.py"]
        if (PACKAGE / Path(*folders, last)).is_dir():
            places.append(ROOT / "tests" / Path(*folders, last) / f"test_{last}.py")
        if not any(place.is_file() for place in places):
            missing.append(module.name)
    return missing


_RUST_FUNCTION = re.compile(r"\bfn\s+(\w+)\s*(?:<[^(]*?>)?\s*\(")


def rust_arguments(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of arguments of every function, without `self`."""
    for found in _RUST_FUNCTION.finditer(text):
        depth, parts, part = 1, [], ""
        for c in text[found.end() : found.end() + 4000]:
            depth += (c in "([{<") - (c in ")]}") - (c == ">" and not part.endswith("-"))
            if depth == 0:
                break
            if c == "," and depth == 1:
                parts.append(part)
                part = ""
            else:
                part += c
        names = [p.strip() for p in (*parts, part) if p.strip()]
        yield found[1], len([n for n in names if not re.fullmatch(r"(?:&(?:'\w+ )?)?(?:mut )?self", n)])


def rust_too_many_arguments() -> dict[str, int]:
    """Functions of the core and the binding with more than seven arguments, without the one that is `py`."""
    return {
        f"{path.relative_to(ROOT / 'rust')}:{name}": n
        for path in sorted((ROOT / "rust").rglob("*.rs"))
        for name, n in rust_arguments(path.read_text("utf-8"))
        if n > MAX_ARGUMENTS
    }


@cache
def rust_graph() -> Graph:
    """Files of the core that each file imports: `mod.rs` of a folder stands for what its siblings share."""
    names = {str(path.relative_to(CORE).with_suffix("")): path for path in CORE.rglob("*.rs")}
    graph: Graph = {}
    for name, path in names.items():
        own = name.rpartition("/")[0]
        graph[name] = set()
        for up, used in re.findall(r"\buse (super|crate)::([\w:]+)", path.read_text("utf-8")):
            where = (own if path.name != "mod.rs" else own.rpartition("/")[0]) if up == "super" else ""
            parts = [p for p in where.split("/") if p] + used.split("::")
            while parts and "/".join(parts) not in names:
                parts.pop()
            graph[name] |= {"/".join(parts)} - {"", name}
    return graph


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


def measures() -> list[Measure]:
    """All measures of the house."""
    lines = {m.name: m.n_lines for m in modules()}
    paper = sum(n for name, n in lines.items() if name.startswith("paper"))
    trunk = sum(n for name, n in lines.items() if name.partition(".")[0] in TRUNK)
    product = {m.name for m in modules() if m.folder != "paper"}
    testable = [m for m in modules() if m.n_code > 10 and not m.name.startswith("_")]
    share = 100 * (1 - len(without_mirrored_test()) / len(testable))
    house = rooms({name: found for name, found in import_graph().items() if name in product})
    return [
        Measure("lines of the package without paper/", sum(lines.values()) - paper, 30_000),
        Measure("lines from command to file", trunk, 10_000),
        Measure("lines of paper/", paper, 6_000),
        Measure("circles between Python modules", len(circles(import_graph())), 0),
        Measure("circles between files of the core", len(circles(rust_graph())), 0),
        Measure("floors of rooms", len(floors(house)), 10),
        *(
            Measure(f"classes called {name} in one language", max(map(len, classes(name))), 1)
            for name in ONE_CLASS
        ),
        Measure("Python functions with more than 7 arguments", len(too_many_arguments()), 5),
        Measure("Rust functions with more than 7 arguments", len(rust_too_many_arguments()), 5),
        Measure("% of modules with a test at the mirrored path", round(share), 90, least=True),
    ]


def main() -> None:
    """Print the measures and the rooms."""
    print(f"{'measure':48} {'today':>7} {'goal':>7}")
    for m in measures():
        print(f"{m.what:48} {m.value:7,} {m.goal:7,}  {'' if m.met else 'not reached'}")
    print(f"\n{'room':14} {'files':>5} {'lines':>6} {'code':>6}  longest file, longest function")
    for folder in sorted({module.folder for module in modules()}):
        of = [m for m in modules() if m.folder == folder]
        lengths = [(f.end_lineno or 0) - f.lineno + 1 for m in of for f in m.functions()]
        longest = f"{max(m.n_lines for m in of)}, {max(lengths, default=0)}"
        total, code = sum(m.n_lines for m in of), sum(m.n_code for m in of)
        print(f"{folder:14} {len(of):5} {total:6} {code:6}  {longest}")
    print(f"\nfloors: {' < '.join(' '.join(floor) for floor in floors(rooms(import_graph())))}")
    for title, found in (
        ("circles", [*circles(import_graph()), *circles(rust_graph())]),
        ("more than 7 arguments", [*too_many_arguments().items(), *rust_too_many_arguments().items()]),
        ("no test at the mirrored path", without_mirrored_test()),
    ):
        print(f"\n{title}: {len(found)}")
        for line in found:
            print(f"  {line}")


if __name__ == "__main__":
    main()
