"""Rules of the house that a test can keep."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import loopq
from tests.house import counts, measures
from tests.support.interpreters import ROOT, python


def _tracked() -> list[str]:
    """Files of the repository."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_there_is_one_version():
    pattern = rf"^## \[{re.escape(loopq.__version__)}\]"
    assert re.search(pattern, (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert f"\nversion: {loopq.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert (
        tomllib.loads((ROOT / "Cargo.toml").read_text("utf-8"))["workspace"]["package"]["version"]
        == loopq.__version__
    )


#: Names that two or more classes still share. A name leaves the list once one class has it.
SHARED_NAMES = dict.fromkeys(("Dory", "Ouro"), "an adapter, and vLLM's class")


def test_no_class_name_stands_for_two_classes():
    homes: dict[str, set[str]] = {}
    for module in counts.modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(module.name)
    twice = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert {name: modules for name, modules in twice.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) <= set(twice), "an exception that is no longer needed"


def test_public_functions_document_every_parameter():
    from numpydoc.validate import validate

    for name in loopq.__all__:
        thing = getattr(loopq, name)
        if name.startswith("__") or not callable(thing):
            continue
        errors = dict(validate(f"loopq.{name}")["errors"])
        wanted = {"GL08", "SS03", "PR01", "PR02", "PR03", "RT01" if inspect.isfunction(thing) else "GL08"}
        assert not wanted & set(errors), {c: errors[c] for c in wanted & set(errors)}


def test_the_reference_holds_every_public_name_and_parameter():
    from numpydoc.validate import validate

    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    names, module = [], ""
    for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)$", text, re.MULTILINE):
        if kind == "currentmodule":
            module = name
        # A protocol has no parameters; the tool sees those of its hidden constructor.
        elif kind in ("autofunction", "autoclass") and not name.endswith(".Quantizer"):
            names.append(name if name.startswith("loopq.") else f"{module}.{name}")
    public = {f"loopq.{n}" for n in loopq.__all__ if not n.startswith("__") and n != "LoopqError"}
    assert public <= set(names)
    wanted = {"GL08", "SS03", "PR01", "PR02", "PR03"}
    wrong = {n: [e for e in validate(n)["errors"] if e[0] in wanted] for n in names}
    assert not {n: e for n, e in wrong.items() if e}


def test_examples_of_docstrings_run():
    files = [p for p in (ROOT / "python" / "loopq").rglob("*.py") if ">>> " in p.read_text("utf-8")]
    assert files
    for path in files:
        name = ".".join(path.relative_to(ROOT / "python").with_suffix("").parts)
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted > 0, name
        assert result.failed == 0, name


@pytest.mark.slow
def test_readme_example_runs():
    text = (ROOT / "README.md").read_text("utf-8")
    *_, longer = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = python(longer)
    kl = {line.split()[0]: float(line.split("KL")[1].split()[0]) for line in printed.splitlines()[1:]}
    assert kl["all"] < kl["first"]


def test_bounded_measures_hold():
    beyond = [str(m) for m in measures.bounded() if m.value > m.bound]
    assert not beyond, "beyond the bound in the last column; `make counts` lists where"


def test_commands_read_their_options_once():
    """`cli` makes the command line, and `commands.options` has the readers of options that several commands share."""
    of = [m for m in counts.modules() if m.name not in ("cli", "commands.options")]
    assert counts.options_handed_on(of) == [], "read the options into a frozen dataclass, by its `of`"


def test_most_modules_have_a_test_at_the_mirrored_path():
    without = counts.without_mirrored_test()
    assert len(without) <= len(counts.testable()) / 10, without


def _documents() -> list[Path]:
    """Pages of the repository, records apart."""
    beside = [page for name in ("kernels", "examples") for page in (ROOT / name).glob("*.md")]
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *beside]


def test_links_of_the_documents_lead_somewhere():
    for document in _documents():
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)}: {target}"


def test_files_that_the_documents_name_exist():
    files = [path for path in _tracked() if (ROOT / path).exists()]
    folders = {str(parent) for path in files for parent in Path(path).parents}
    named = r"`((?:[\w-]+/)+[\w.-]*)(?:[ :][^`]*)?`"
    for document in _documents():
        for name in re.findall(named, document.read_text("utf-8")):
            # Only names that begin as those of the repository or of the package do, or end as a source does.
            inside = any((root / name.split("/")[0]).is_dir() for root in (ROOT, ROOT / "python" / "loopq"))
            if inside or Path(name).suffix in (".py", ".rs", ".md"):
                tracked = name.rstrip("/") in folders or any(path.endswith(name) for path in files)
                assert tracked or (ROOT / "python" / "loopq" / name).exists(), f"{document.name}: {name}"


def test_tracked_text_names_no_machine():
    pattern = re.compile(r"(?<![\w.~-])/(?:work|root|farm|home)/")
    for name in _tracked():
        path = ROOT / name
        if (
            path.suffix in {".py", ".rs", ".md", ".toml", ".cu", ".cuh", ".json", ".pyi", ".h", ".sh"}
            and path.exists()
        ):
            assert not pattern.search(path.read_text("utf-8")), name
