"""The pages show the truth: examples run, commands exist, and the tutorial prints the quoted output."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benches import gguf, pages, paper
from benches.quality import calls, depth, peers, peers_table, real
from benches.zoo import overview
from loopq import cli
from loopq.cli import main, parse, parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(page for name in ("kernels", "examples") for page in (ROOT / name).glob("*.md")),
    ]
)
#: Examples that a test machine cannot run: (page, part of the example).
ELSEWHERE = {
    ("compressed-tensors.md", "register_checkpoint_conversion_mapping"): "a checkpoint of HRM-Text",
    (
        "interop.md",
        "import loopq.runtime.transformers",
    ): "a checkpoint of a model of transformers",
    ("adapter.md", "# my_loop.py"): "a process of its own; `test_howto` runs it",
    ("batches.md", "# forecast.py"): "a package of its own; `test_howto` runs it",
    ("merged.md", ".py\n"): "files of the page; `test_howto` runs them",
    ("engines.md", "# tokens.py"): "a process of its own; `test_howto` runs it",
}
#: Examples that take too long for a quick test, by a part of their text.
LONG = (
    'loopq.quantize("huginn_small", out="Q", bits=4, group_size=32, n_prompts=8)',
    "found = loopq.diagnose", "for measured in loopq.evaluate", "in one go",
    "loaded.model.bfloat16()", "QuantLinear.from_layer(quantized)", "HrmTextForCausalLM(small)",
)  # fmt: skip
_DECIMAL = re.compile(r"\d+\.\d+(?:e[-+]?\d+)?")


def _blocks(kinds: str) -> list[tuple[Path, str]]:
    pattern = re.compile(rf"^ *```(?:{kinds})\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    return [(page, block) for page in PAGES for block in pattern.findall(page.read_text("utf-8"))]


def _examples() -> list[object]:
    examples = []
    for page, block in _blocks("python"):
        if not any(page.name == name and words in block for name, words in ELSEWHERE):
            marks = [pytest.mark.slow] if any(words in block for words in LONG) else []
            line = page.read_text("utf-8")[: page.read_text("utf-8").index(block)].count("\n")
            examples.append(pytest.param(block, id=f"{page.name}:{line}", marks=marks))
    return examples


def _commands() -> list[tuple[str, str]]:
    """Every `loopq` command on a page, without its comment; the tutorial's are run, the others read."""
    commands = []
    for page, block in _blocks("console|sh"):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            # In a console, what follows no prompt was printed; in a script every line is a command.
            if "$ " in block and not line.strip().startswith("$ "):
                continue
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            for _, command in itertools.groupby(words, lambda word: word == "&&"):
                name, *rest = command
                if name == "loopq":
                    commands.append((page.name, shlex.join(rest)))
    return commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.stem)
def test_script_of_examples_runs(script, folder):
    subprocess.run([sys.executable, script], check=True)


def test_the_page_of_settings_is_what_the_settings_declare():
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert script["FILE"].read_text("utf-8") == script["page"](), "run python docs/settings.py"


@pytest.mark.parametrize("example", _examples())
def test_example_runs(example, folder):
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(textwrap.dedent(example), "example", "exec"), {"__name__": "example"})


def test_commands_are_read(monkeypatch, capsys):
    # One parser reads them all: to build it takes longer than to read a command.
    once = parser()
    monkeypatch.setattr(cli, "parser", lambda: once)
    wrong = []
    for page, command in sorted(set(_commands())):
        # MODEL, DIR and the like stand for names; an ellipsis in brackets is how a page says "and more of these".
        words = shlex.split(command.replace("[MODEL ...]", "MODEL"))
        try:
            read = bool(parse(words).run)
        except SystemExit as stopped:
            read = stopped.code == 0 and words[-1] in ("--help", "--help-all", "--version")
        if not read:
            wrong.append(f"{page}: loopq {command}\n{capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)


def test_options_that_sentences_name_exist():
    (commands,) = parser()._subparsers._group_actions
    known = {name: set(sub._option_string_actions) for name, sub in commands.choices.items()}
    wrong, seen = [], 0
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for command in re.findall(r"`loopq ([a-z][^`]*)`", prose):
            name, *words = command.split()
            options = {w.partition("=")[0] for w in words if w.startswith("--")}
            seen += bool(options)
            # `loopq COMMAND` stands for any; what is wrong is a command or an option that there is not.
            if options - known.get(name, set()) or (name.islower() and name not in known):
                wrong.append(f"{page.name}: loopq {command}")
    assert not wrong
    assert seen > 20


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(folder, capsys):
    page = ROOT / "docs" / "tutorial.md"
    checked = 0
    for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = entry.partition("\n")
            assert main(shlex.split(command)[1:]) == 0, command
            printed = capsys.readouterr().out
            for line in shown.splitlines():
                # `...` stands for lines left out; times and what the standard error says differ.
                if line.strip() != "..." and not line.startswith("loopq:"):
                    assert _same(line, printed), f"{command}\n{line!r} is not in\n{printed}"
                    checked += 1
    assert checked > 10


def _same(line: str, printed: str) -> bool:
    """Whether a line was printed: decimals within 2 %, since processors round otherwise, the rest as it stands."""

    def split(text: str) -> tuple[str, list[float]]:
        text = " ".join(text.split())
        return _DECIMAL.sub("#", text), [float(number) for number in _DECIMAL.findall(text)]

    words, numbers = split(line)
    others = map(split, printed.splitlines())
    return any(words == other and values == pytest.approx(numbers, rel=0.02) for other, values in others)


def test_lines_are_compared_by_their_numbers():
    assert _same("KL  0.00239 of 32", "a\nKL 0.00241 of 32")
    assert not _same("KL 0.00239 of 32", "KL 0.00289 of 32")
    assert not _same("KL 0.00239 of 32", "KL 0.00239 of 33")
    assert not _same("KL 0.00239 of 32", "KL -0.00239 of 32")


def test_each_statement_about_safety_names_a_test_that_exists():
    text = (ROOT / "docs" / "safety.md").read_text("utf-8")
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| statement"))
    ]
    assert len(rows) > 20
    for row in rows:
        named = re.search(r"\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", row)
        assert named, f"no test: {row}"
        assert f"\ndef {named[2]}(" in (ROOT / named[1]).read_text("utf-8"), row


def _tables() -> dict[tuple[Path, str], str]:
    """What the generators print, by page and mark. Each reads its newest record."""
    names = ("peers", "gguf", "calls", "depth")
    newest = {name: max(pages.RECORD.glob(f"{name}-20??-??-??.json")) for name in names}
    record = {name: json.loads(file.read_text("utf-8")) for name, file in newest.items()}
    docs = pages.ROOT / "docs"
    return {
        (docs / "comparison.md", "peers"): peers_table.page(record["peers"]["records"], [*peers.OURS]),
        (overview.DOCUMENT, overview.MARK): overview.table(),
        **{
            (docs / "formats" / "gguf.md", f"types of {run['model']}"): gguf.shown(run)
            for run in record["gguf"].values()
            if run["model"] == gguf.SHOWN_MODEL
        },
        **{(paper.DOCUMENT, mark): text for mark, text in paper.parts().items()},
        **calls.pages(record["calls"]),
        **depth.pages(record["depth"]),
        **real.pages(json.loads(real.DATA.read_text("utf-8"))),
    }


def test_blocks_between_marks_are_what_the_generators_print():
    tables = {(page.relative_to(pages.ROOT), mark): text for (page, mark), text in _tables().items()}
    texts = {page.relative_to(ROOT): page.read_text("utf-8") for page in PAGES}
    marks = {(page, m) for page in texts for m in re.findall(r"<!-- ([\w ]+): begin -->", texts[page])}
    assert marks <= set(tables), "a block that no generator writes"
    old = [f"{page}: {m}" for (page, m), text in tables.items() if pages.within(ROOT / page, m) != text]
    assert not old, (
        "run python -m benches.paper, benches.zoo.overview, or calls, depth or real of benches.quality"
    )
