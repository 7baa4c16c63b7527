"""What the house rules are about, read from the code: modules, imports, units, lengths. `measures` prints it.

The package is one **quantizer** with three **guests**: folders whose removal leaves a whole product. A **unit** is a
file that a registry finds: a grid, a system, a format, a method, a command. All other code is the **frame**.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.house import process, rust

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "loopq"
GUESTS = ("runtime", "analysis", "paper")
MAX_ARGUMENTS = 7
#: The command `loopq` owns its process: its streams, and what a Ctrl-C at its end prints.
PROGRAM = ("__main__", "terminal.interrupts")

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


def options_handed_on(of: Iterable[Module]) -> list[str]:
    """Functions that take a whole command line, and fields that keep one, apart from a command's `run` and readers.

    A reader is the `of` of a dataclass, a function that `of` calls, or the `asked` of a hook.
    """
    beyond = []
    for module in of:
        taking = [f for f in module.functions() if "argparse.Namespace" in ast.unparse(f.args)]
        calls = (c.func for f in taking if f.name == "of" for c in ast.walk(f) if isinstance(c, ast.Call))
        readers = {"run", "of", "asked", *(c.id for c in calls if isinstance(c, ast.Name))}
        beyond += [f"{module.name}.{f.name}" for f in taking if f.name not in readers]
        for cls in module.classes():
            fields = [ast.unparse(node.annotation) for node in cls.body if isinstance(node, ast.AnnAssign)]
            kept = any("argparse.Namespace" in text.replace("[[argparse.Namespace", "") for text in fields)
            beyond += [f"{module.name}.{cls.name}"] if kept else []
    return beyond


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
    return {
        name: {i for i in imported if not is_guests(i)} for name, imported in graph if not is_guests(name)
    }


def ties() -> list[str]:
    """Imports of a guest by the quantizer."""
    imports = ((m.name, other) for m in quantizer() for other in sorted(import_graph()[m.name]))
    return [f"{name} > {other}" for name, other in imports if is_guests(other)]


@cache
def units() -> dict[str, str]:
    """Modules that a registry finds, with the registry's name: they lie in its package, or in a room's package of
    that name, and register."""
    packages: dict[str, set[str]] = {}
    pattern = r"^(\w+)(?::[^=]+)? = Registry\(\s*[^,]+,\s*\"loopq\.([\w.]+)\"\s*[,)]"
    for module in modules():
        for registry, package in re.findall(pattern, module.text, re.MULTILINE):
            # A guest that adds to another one's registry has its package at the same place below its own folder.
            below = package.partition(".")[2] if is_guests(package) else package
            packages.setdefault(registry, set()).update({package, below})
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


def mirrored_tests(name: str) -> list[Path]:
    """Test files of a module: `loopq/a/b.py` has `tests/a/test_b.py`. A unit may instead be tested by a suite that its
    registry fills, in the mirrored folder; what is particular to it is in files there that name it."""
    *folders, last = name.split(".")
    folder = ROOT / "tests" / Path(*folders)
    places = [folder / f"test_{last}.py"]
    if (PACKAGE / Path(*folders, last)).is_dir():
        places.append(folder / last / f"test_{last}.py")
    own = [place for place in places if place.is_file()][:1]
    if own or name not in units():
        return own
    texts = {file: file.read_text("utf-8") for file in sorted(folder.glob("test_*.py"))}
    suites = [file for file, text in texts.items() if re.search(rf"\b{units()[name]}\b", text)]
    return [f for f in texts if f in suites or re.search(rf"\b{last}\b", texts[f])] if suites else []


def testable() -> list[str]:
    """Modules that define something."""
    named = [m for m in modules() if not m.name.startswith("_")]
    return [m.name for m in named if any(m.functions()) or any(m.classes())]


def without_mirrored_test() -> list[str]:
    """Modules that define something and have no test at the mirrored path."""
    return [name for name in testable() if not mirrored_tests(name)]
