"""Do the tests see a wrong formula: ``python -m benches.mutation`` changes the measuring modules one place at a time.

The changes are those of cosmic-ray's operators (``pip install cosmic-ray``): another sign, another comparison, a number
one off, a negated condition, a loop that never runs. Each is made in memory in a process of its own, which runs the
tests of that module until the first fails. A change that no test sees has survived; every one is printed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType
from typing import Any

from loopq.terminal.table import render

ROOT = Path(__file__).parents[1]
#: Test files that stand for each module.
TESTS = {
    "loopq.evaluate.stats": ("tests/test_stats.py",),
    "loopq.evaluate.compare": ("tests/evaluate/test_compare.py",),
    "loopq.paper.controls.rounding": ("tests/paper/controls/test_rounding.py",),
    "loopq.diagnose.rank": ("tests/diagnose/test_rank.py",),
    "loopq.diagnose.overlap": ("tests/diagnose/test_rank.py",),
    "loopq.diagnose.proxy": ("tests/diagnose/test_rank.py",),
    "loopq.diagnose.blindness": ("tests/diagnose/test_blindness.py",),
    "loopq.diagnose.displacement": ("tests/diagnose/test_exposure.py",),
    "loopq.diagnose.feedback": ("tests/diagnose/test_exposure.py",),
    "loopq.diagnose.exposure": ("tests/diagnose/test_exposure.py",),
    "loopq.diagnose.rollouts": ("tests/diagnose/test_exposure.py",),
    "loopq.diagnose.sensitivity": ("tests/diagnose/test_sensitivity.py",),
}
#: Of the replacements of an operator, the nearest; the rest die of types. AddNot turns conditions round.
_PAIRS = {
    "BinaryOperator": "Add_Sub Sub_Add Mul_Div Div_Mul Pow_Mul FloorDiv_Div Mod_Mul BitAnd_BitOr BitOr_BitAnd",
    "ComparisonOperator": "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is",
    "UnaryOperator": "USub_UAdd",
}
_OTHERS = "AddNot NumberReplacer ReplaceAndWithOr ReplaceOrWithAnd ReplaceFalseWithTrue ReplaceTrueWithFalse"
_OTHERS += " ReplaceContinueWithBreak ZeroIterationForLoop"
#: Seconds of one core that the tests may take more than unchanged, as a factor and a sum.
_SLOWER, _MORE = 4.0, 10.0


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Parameters
    ----------
    operator : str
        Name of cosmic-ray's operator.
    source : str
        The changed module.
    lines : str
        The line before and after, with its number.
    """

    operator: str
    source: str
    lines: str


class Source(SourceFileLoader):
    """Loads a module from a source at hand; no bytecode is read or written."""

    def __init__(self, name: str, source: str) -> None:
        super().__init__(name, str(file_of(name)))
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        """Return the changed module."""
        return compile(self.source, self.path, "exec")


class Finder(MetaPathFinder):
    """Finds one module at its loader, everything else as ever."""

    def __init__(self, loader: Source) -> None:
        self.loader = loader

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of that module alone."""
        return spec_from_loader(fullname, self.loader) if fullname == self.loader.name else None


def file_of(module: str) -> Path:
    """Return the file of a module."""
    return ROOT / "python" / f"{module.replace('.', '/')}.py"


def operators() -> Iterator[tuple[str, Any]]:
    """Yield cosmic-ray's operators that are used, by name."""
    from cosmic_ray.plugins import get_operator

    names = [f"Replace{kind}_{pair}" for kind, pairs in _PAIRS.items() for pair in pairs.split()]
    for name in [*names, *_OTHERS.split()]:
        yield name, get_operator(f"core/{name}")()


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every change of what a module computes: not of annotations and of arguments' defaults and kinds."""
    from cosmic_ray.mutating import mutate_code

    known = {meaning(source)}
    for name, operator in operators():
        occurrence = 0
        while (changed := mutate_code(source, operator, occurrence)) is not None:
            occurrence += 1
            with contextlib.suppress(SyntaxError):
                what = meaning(changed)
                if what not in known:
                    known.add(what)
                    yield Mutant(name, changed, difference(source, changed))


def meaning(source: str) -> str:
    """Return the program of a module without annotations, what only they need, and how arguments may be given."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arguments):
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.posonlyargs, node.kwonlyargs, node.defaults, node.kw_defaults = [], [], [], []
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.test = ast.Constant(None)
    return ast.dump(tree)


def difference(before: str, after: str) -> str:
    """Return the changed line with its number, as it was and as it is."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    number, old, new = next((n, a, b) for n, (a, b) in enumerate(pairs, 1) if a != b)
    blocks = difflib.SequenceMatcher(None, old, new).get_opcodes()
    marked = "".join(
        new[c:d] if kind == "equal" else f"[{old[a:b]} -> {new[c:d]}]" for kind, a, b, c, d in blocks
    )
    return f"{number}: {marked.strip()}"


def run_tests(module: str, source: str, seconds: int | None) -> bool:
    """Run the tests of a module in a process of its own; return whether all passed within so many seconds of a core."""
    child = os.fork()
    if not child:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        if seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        import pytest

        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, Finder(Source(module, source)))
        options = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
        # Hypothesis is there before pytest, which could not rewrite its assertions: it has none.
        options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        os._exit(int(pytest.main([*options, *TESTS[module]])))
    return os.waitpid(child, 0)[1] == 0


def judge(module: str, pause: Path | None) -> tuple[int, list[Mutant]]:
    """Return how many changes of a module were tried, and those that no test saw."""
    source = file_of(module).read_text("utf-8")
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    if not run_tests(module, source, None):
        raise SystemExit(f"{module}: its tests fail as it is")
    limit = int(_SLOWER * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began) + _MORE)
    survived, n = [], 0
    for mutant in mutants(source):
        while pause is not None and pause.exists():
            time.sleep(1.0)
        n += 1
        if run_tests(module, mutant.source, limit):
            survived.append(mutant)
            print(f"{module} {mutant.lines} ({mutant.operator})", flush=True)
    return n, survived


def preload() -> None:
    """Import what the tests take long to import: processes that are forked have it."""
    for name in ("numpy", "scipy.stats", "torch", "hypothesis", "pytest", "transformers.models.auto"):
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.split(".")[0] in ("loopq", "tests")]
    # A test must import the changed module, not one that is there.
    for name in loaded:
        del sys.modules[name]


def main(arguments: Sequence[str] | None = None) -> None:
    """Try all changes and print what survived, and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="default: all of TESTS")
    parser.add_argument("--pause", type=Path, metavar="FILE", help="begin nothing while this file is there")
    args = parser.parse_args(arguments)
    os.chdir(ROOT)
    preload()
    rows = []
    for module in args.modules:
        n, survived = judge(module, args.pause)
        rows.append((module, " ".join(TESTS[module]), n, n - len(survived), len(survived)))
        print(render(("module", "tests", "changes", "seen", "survived"), rows[-1:]), flush=True)
    print(render(("module", "tests", "changes", "seen", "survived"), rows))


if __name__ == "__main__":
    main()
