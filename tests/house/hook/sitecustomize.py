"""Write down which `raise` statements of loopq run. `tests.house.raised` puts this folder on PYTHONPATH.

Each Python process imports a module of this name when it starts, so programs that tests start are seen too.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType


def places(tree: ast.AST, within: str = "") -> Iterator[tuple[ast.Raise, str]]:
    """Each `raise` with the function it stands in and its number there, as in `Journal.find 2`."""
    count, waiting = 0, list(ast.iter_child_nodes(tree))
    for node in waiting:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from places(node, f"{within}.{node.name}".lstrip("."))
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            count += 1
            yield node, f"{within} {count}"
        waiting += ast.iter_child_nodes(node)


class _Noting(ast.NodeTransformer):
    def __init__(self, names: dict[ast.Raise, str]) -> None:
        self._names = names

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        if node not in self._names:
            return [node]
        call = ast.parse(f"__raised__({self._names[node]!r})").body[0]
        for part in ast.walk(call):
            ast.copy_location(part, node)
        return [call, node]


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile without the cache of the interpreter, which others read."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        name = fullname.removeprefix("loopq").lstrip(".") or "__init__"
        return compile(
            _Noting({node: f"{name}: {place}" for node, place in places(tree)}).visit(tree),
            path,
            "exec",
            dont_inherit=True,
        )


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find modules of loopq as Python does, with another loader."""
        if name.partition(".")[0] != "loopq":
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def note(file: Path) -> None:
    """Append each `raise` to a file when it first runs in this process."""
    seen: set[str] = set()

    def raised(name: str) -> None:
        if name not in seen:
            seen.add(name)
            handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(handle, f"{name}\n".encode())
            os.close(handle)

    builtins.__raised__ = raised  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)


if "LOOPQ_RAISED" in os.environ:
    note(Path(os.environ["LOOPQ_RAISED"]))
