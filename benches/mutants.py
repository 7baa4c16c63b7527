"""Does each module's own test see a wrong line: ``python -m benches.mutants`` changes the package by lot.

One place of a module is changed at a time, in a copy of the working tree. Then the test at the mirrored path
runs alone: `loopq/a/b.py` is judged by `tests/a/test_b.py`, and a unit without such a file by the suite that its
registry fills. The changes are those of mutation tests: a
changed comparison, boundary, operator or number, a negated condition, a removed statement, or two swapped
arguments. Annotations and the keywords `frozen` and `strict` stay. Places are drawn in an order by lot that a
seed decides, so any number of them is a sample. A result is kept for as long as neither the module nor its
test changes; an interrupted run continues.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.house.counts import PACKAGE, ROOT, mirrored_tests, modules
from tests.support.house import copy_house

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
BOUNDARIES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
#: They guard against a programmer's slip and change no result.
GUARDS = {"frozen", "strict"}
#: The order of their arguments is no matter.
SYMMETRIC = {"min", "max"}
#: Modules of others that take long to import: every forked process has them already.
PRELOADED = (
    "torch", "transformers.modeling_utils", "safetensors.torch", "scipy.stats", "pytest", "_pytest.doctest",
    "hypothesis.strategies", "_hypothesis_pytestplugin", "xdist", "pytest_timeout", "anyio.pytest_plugin",
)  # fmt: skip
#: Seconds that a test may take beyond five times its own.
PATIENCE = 30
KILLED, SURVIVED, NO_TEST, BROKEN = "killed", "survived", "no test", "fails unchanged"


@dataclass(frozen=True)
class Mutant:
    """One change of one module: what `changes` gives for the node of that number."""

    module: str
    node: int
    variant: int
    operator: str
    line: int

    @property
    def name(self) -> str:
        """Its place and kind, unique in one version of the module."""
        return f"{self.module}:{self.line} {self.operator} {self.node}.{self.variant}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Give each changed form of a node, with the name of the operator."""
    match node:
        case ast.Compare(left, [op], right):
            if type(op) in COMPARISONS:
                yield "comparison", ast.Compare(left, [COMPARISONS[type(op)]()], right)
            if type(op) in BOUNDARIES:
                yield "boundary", ast.Compare(left, [BOUNDARIES[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.Constant(bool(value)):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield "constant", ast.Constant(2.0 * value if value else 1.0)
        case ast.BoolOp(op, values):
            yield "boolean", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "boolean", operand
        case ast.Expr(ast.Call()) | ast.Raise() | ast.AugAssign():
            yield "removed statement", ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "removed statement", ast.Pass()
        case ast.Call(called, [first, second, *rest], keywords):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            symmetric = isinstance(called, ast.Name) and called.id in SYMMETRIC
            if not starred and not symmetric and ast.dump(first) != ast.dump(second):
                yield "swapped argument", ast.Call(called, [second, first, *rest], keywords)


def untouched(tree: ast.AST) -> set[int]:
    """Nodes that say nothing of what a module does: annotations, guards, imports for type checkers."""
    ids: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts = [node.returns]
            case ast.arg() | ast.AnnAssign():
                parts = [node.annotation]
            case ast.keyword() if node.arg in GUARDS:
                parts = [node.value]
            case ast.If(ast.Name("TYPE_CHECKING")):
                parts = [node]
        ids |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return ids


def lot(seed: int) -> list[Mutant]:
    """Every change of every module of the package, in an order by lot.

    A change's place in the order depends on itself alone, so a sample stays nearly the same when other code changes.
    """
    by_key: dict[str, Mutant] = {}
    for module in modules():
        left, seen = untouched(module.tree), Counter[str]()
        for n, node in enumerate(ast.walk(module.tree)):
            if id(node) in left:
                continue
            for k, (operator, _) in enumerate(changes(node)):
                text = f"{seed} {module.name} {operator} {ast.dump(node)}"
                seen[text] += 1
                key = hashlib.sha256(f"{text} {seen[text]}".encode()).hexdigest()
                by_key[key] = Mutant(module.name, n, k, operator, getattr(node, "lineno", 0))
    return [mutant for _, mutant in sorted(by_key.items())]


def within(module: str, rooms: Iterable[str]) -> bool:
    """Tell whether a module is one of these, or inside one of them."""
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


def changed_text(text: str, mutant: Mutant) -> str:
    """Write a module again with one change; comments are left out."""
    tree = ast.parse(text)
    target = list(ast.walk(tree))[mutant.node]
    _, new = list(changes(target))[mutant.variant]

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Put().visit(tree)))


def path_of(module: str) -> Path:
    """File of a module, relative to the repository."""
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return (path if path.is_file() else path.with_suffix("") / "__init__.py").relative_to(ROOT)


class Copy:
    """A copy of the working tree, where modules are changed and tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        copy_house(folder, ("python", "tests", "benches"))
        # Modules are compiled once: an unchanged one is read from here.
        compiled = [sys.executable, "-m", "compileall", "-q", "python", "tests", "benches"]
        subprocess.run(compiled, cwd=folder, check=True)

    def judge(self, mutant: Mutant, tests: Sequence[Path], seconds: float) -> str:
        """Make a change, run the tests, and take the change back."""
        path = self.folder / path_of(mutant.module)
        before, times = path.read_text("utf-8"), path.stat()
        path.write_text(changed_text(before, mutant), "utf-8")
        # A time unlike that of the compiled module, even if the size is the same.
        os.utime(path, (times.st_atime, times.st_mtime + 10))
        try:
            return self.run(tests, seconds)
        finally:
            path.write_text(before, "utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Sequence[Path], seconds: float) -> str:
        """Run test files until their first failure, in a forked process."""
        child = os.fork()
        if child == 0:
            os.setsid()
            code = 3
            try:
                code = self._pytest(tests)
            finally:
                os._exit(code)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return {0: SURVIVED, 5: NO_TEST}.get(code, KILLED)
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return KILLED

    def _pytest(self, tests: Sequence[Path]) -> int:
        """Run pytest in this process, which ends afterwards."""
        import pytest

        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.chdir(self.folder)
        paths = [str(self.folder / "python"), str(self.folder)]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [*paths, *(p for p in sys.path if p and Path(p) not in (ROOT, ROOT / "python"))]
        for name in [n for n in sys.modules if n.partition(".")[0] in ("loopq", "tests", "benches")]:
            del sys.modules[name]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--rootdir", "."]
        # Plugins are there before pytest could rewrite their asserts.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*options, *map(str, tests)]))


class Results:
    """Results, one a line; the key of a result is the text of module and test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self.known: dict[str, str | float] = {r["key"]: r["result"] for r in map(json.loads, lines)}

    @staticmethod
    def key(name: str, *texts: Path) -> str:
        """Name of a result for these versions of files."""
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in texts))
        return f"{name} {digest.hexdigest()[:12]}"

    def add(self, key: str, result: str | float) -> None:
        """Keep a result."""
        self.known[key] = result
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"key": key, "result": result}) + "\n")


def judged(mutant: Mutant, copy: Copy, results: Results) -> str:
    """Give the result of a mutant, from before where nothing changed since."""
    # Those of the copy: someone may work on the tests meanwhile.
    found = [place.relative_to(ROOT) for place in mirrored_tests(mutant.module)]
    tests = [test for test in found if (copy.folder / test).is_file()]
    if not tests:
        return NO_TEST
    texts = (copy.folder / path_of(mutant.module), *(copy.folder / test for test in tests))
    key = results.key(mutant.name, *texts)
    if key not in results.known:
        time_key = results.key(f"seconds of {' '.join(map(str, tests))}", *texts)
        if time_key not in results.known:
            begin = time.monotonic()
            verdict = copy.run(tests, 1200)
            results.add(time_key, time.monotonic() - begin if verdict != KILLED else BROKEN)
        seconds = results.known[time_key]
        result = BROKEN if isinstance(seconds, str) else copy.judge(mutant, tests, PATIENCE + 5 * seconds)
        results.add(key, result)
    return str(results.known[key])


def table(judgements: list[tuple[Mutant, str]], what: str) -> str:
    """Count results by room or by operator, as a table in Markdown."""
    columns = (KILLED, SURVIVED, NO_TEST, BROKEN)
    counts: dict[str, Counter[str]] = {}
    for mutant, result in judgements:
        row = mutant.module.partition(".")[0] if what == "room" else mutant.operator
        counts.setdefault(row, Counter())[result] += 1
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), Counter[str]()))]
    lines = [f"| {what} | mutants | {' | '.join(columns)} |", f"|---{'|---' * (len(columns) + 1)}|"]
    for row, of in rows:
        lines.append(f"| {row} | {of.total()} | {' | '.join(str(of[c]) for c in columns)} |")
    return "\n".join(lines)


def main() -> None:
    """Judge mutants, print those that no test sees, and two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, metavar="N", default=200, help="mutants that are judged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", metavar="ROOM", action="append", help="draw the sample from these rooms or modules alone"
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "mutants")
    args = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    args.work.mkdir(parents=True, exist_ok=True)
    results, copy = Results(args.work / "results.jsonl"), Copy(args.work / f"copy-{os.getpid()}")
    places = [m for m in lot(args.seed) if not args.only or within(m.module, args.only)]
    drawn = places[: args.sample]
    judgements = []
    try:
        for mutant in drawn:
            judgements.append((mutant, judged(mutant, copy, results)))
            if judgements[-1][1] != KILLED:
                print(f"{judgements[-1][1]}: {mutant.name}", flush=True)
    finally:
        shutil.rmtree(copy.folder, ignore_errors=True)
    for what in ("room", "operator"):
        print(f"\n{table(judgements, what)}")


if __name__ == "__main__":
    main()
