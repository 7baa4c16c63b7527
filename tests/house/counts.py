"""Count what the house rules bound: `python tests/house/counts.py` prints a table for each folder of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "loopq"
#: The way of a weight from the command line to a file and back.
TRUNK = ("api", "cli", "commands", "run", "quantizers", "gradients", "calibrate", "checkpoint", "settings", "annotations")
MAX_ARGUMENTS = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef


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
        """First part of the name."""
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
        """Modules of the package that this one imports when it is imported itself."""
        for node in _at_import(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loopq"):
                for alias in node.names:
                    yield f"{node.module}.{alias.name}".removeprefix("loopq.")


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that run on import: none in functions, none for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_import(child)


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text("utf-8")
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found.append(Module(name, text, ast.parse(text)))
    return tuple(found)


def n_arguments(function: Function) -> int:
    """Arguments without `self`, `cls`, `*args` and `**kwargs`."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def too_many_arguments() -> dict[str, int]:
    """Functions of the trunk with more than seven arguments."""
    return {
        f"{module.name}.{function.name}": n_arguments(function)
        for module in modules()
        if module.folder in TRUNK
        for function in module.functions()
        if n_arguments(function) > MAX_ARGUMENTS
    }


def floors() -> list[list[str]]:
    """Folders of the trunk, those that import none of the others first.

    Raises
    ------
    ValueError
        Folders import each other.
    """
    edges: dict[str, set[str]] = {name: set() for name in TRUNK}
    for module in modules():
        if module.folder in TRUNK:
            edges[module.folder] |= {i.partition(".")[0] for i in module.imports()} & set(TRUNK) - {
                module.folder
            }
    below: list[list[str]] = []
    done: set[str] = set()
    while len(done) < len(edges):
        free = [name for name in edges if name not in done and edges[name] <= done]
        if not free:
            raise ValueError(f"the trunk's folders import each other: {sorted(set(edges) - done)}")
        below.append(sorted(free))
        done |= set(free)
    return below


def main() -> None:
    """Print the counts."""
    folders = sorted({module.folder for module in modules()}, key=lambda name: (name not in TRUNK, name))
    print(f"{'folder':14} {'files':>5} {'lines':>6} {'code':>6}  longest file, longest function")
    total = {True: [0, 0, 0], False: [0, 0, 0]}
    for folder in folders:
        of = [m for m in modules() if m.folder == folder]
        counts = [len(of), sum(m.n_lines for m in of), sum(m.n_code for m in of)]
        total[folder in TRUNK] = [a + b for a, b in zip(total[folder in TRUNK], counts, strict=True)]
        lengths = [(f.end_lineno or 0) - f.lineno + 1 for m in of for f in m.functions()]
        longest = f"{max(m.n_lines for m in of)}, {max(lengths, default=0)}"
        mark = "" if folder in TRUNK else "  "
        print(f"{mark + folder:14} {counts[0]:5} {counts[1]:6} {counts[2]:6}  {longest}")
    for trunk, name in ((True, "trunk"), (False, "the rest")):
        print(f"{name:14} {total[trunk][0]:5} {total[trunk][1]:6} {total[trunk][2]:6}")
    print(f"floors of the trunk: {' < '.join(' '.join(floor) for floor in floors())}")
    print(
        f"functions of the trunk with more than {MAX_ARGUMENTS} arguments: {too_many_arguments() or 'none'}"
    )


if __name__ == "__main__":
    main()
