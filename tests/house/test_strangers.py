"""Text from others: no command hands a terminal, a card or a page what these would obey."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from loopq.analysis.report.card import write_card
from loopq.analysis.report.markup import markdown
from loopq.calibrate.dump import Dump
from loopq.cli import main, parser
from loopq.errors import LoopqError
from loopq.formats import FORMATS
from loopq.formats.convert import read_any, write_as
from tests.soak.files import EVIL, replace, seal_files
from tests.terminal.test_text import OBEYED


def test_markdown_holds_no_markup_from_outside():
    safe = markdown({EVIL: [EVIL, 3, None]})
    assert safe[markdown(EVIL)] == [markdown(EVIL), 3, None]
    assert not set(markdown(EVIL)) & set("<>`\n\x1b")
    assert "[x\\](y:z)" in markdown(EVIL)
    assert markdown("some/model[8:20]x2") == "some/model[8:20]x2"
    assert markdown("INT4 g16, gptq_v2 (C:/a)") == "INT4 g16, gptq_v2 (C:/a)"


def places(data, at=()):
    """The paths of all strings in plain data."""
    parts = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in parts:
        if isinstance(value, str):
            yield (*at, key)
        yield from places(value, (*at, key))


def changed(data, place):
    data = copy.deepcopy(data)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = EVIL
    return data


FEW = "--n-prompts 1 --seq-len 8"
#: Lines of every command that is given a folder. A line that does not take a folder of this kind refuses it.
LINES = {
    "quantize": [f"quantize {{it}} --out {{out}}/q --method rtn --group-size 16 {FEW}"],
    "evaluate": [f"evaluate {{model}} {{it}} {FEW} --html {{out}}/e.html", f"evaluate {{it}} {{it}} {FEW}"],
    "inspect": ["inspect {it}", "inspect {it} --json"],
    "run": ["run {it} abc --n-tokens 2"],
    "card": ["card {it}", "card {it} {model}"],
    "export": [f"export {{it}} --out {{out}}/{name} --format {name}" for name in sorted(FORMATS)],
    "diagnose": [f"diagnose {{it}} --quick {FEW} --html {{out}}/d.html"],
    "collect": [f"collect {{it}} --out {{out}}/c --hessian {FEW}"],
    "merge": ["merge {it} {it} --out {out}/m"],
    "solve": ["solve {it} --out {out}/s --method rtn --group-size 16"],
    "check": ["check {it}"],
    "reproduce": [
        "reproduce rank {it} --work {out}/w --out {out}/r --n-calibration 1 --n-evaluation 1 --n-seeds 1 "
        f"{FEW}"
    ],
}


def hostile(source: Path, out: Path, index: str, pattern: str) -> Path:
    """Copy a checkpoint or dump, and change every string of some files that its reader takes. The sums fit."""
    read = {"loopq.json": read_any, "manifest.json": Dump}[index]
    shutil.copytree(source, out)
    n_kept = 0
    for path in sorted(out.glob(pattern)):
        for number in range(len(_values(path))):
            for place in list(places(json.loads(_values(path)[number]))):
                before, lines = (path.read_bytes(), (out / index).read_bytes()), _values(path)
                lines[number] = json.dumps(changed(json.loads(lines[number]), place))
                replace(path, "\n".join(lines).encode())
                seal_files(out, index)
                try:
                    read(out)
                except LoopqError:
                    replace(path, before[0])
                    replace(out / index, before[1])
                else:
                    n_kept += 1
    assert n_kept > 2
    return out


def _values(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]


@pytest.fixture(scope="module")
def strangers(saved_model, quantized, tmp_path_factory) -> list[Path]:
    """A dump, and checkpoints with hostile settings and reports, hostile side files, and both."""
    base = tmp_path_factory.mktemp("strangers")
    more = {
        "_name_or_path": "x",
        "architectures": ["x"],
        "auto_map": {"AutoConfig": "x"},
        "of_another_tool": "x",
    }
    config = shutil.copytree(quantized, base / "q") / "config.json"
    replace(config, json.dumps(json.loads(config.read_text()) | more).encode())
    seal_files(base / "q", "loopq.json")
    assert main(["collect", str(saved_model), "--out", str(base / "d"), "--hessian", *FEW.split()]) == 0
    kinds = {"settings": "[lr]*.json*", "side": "config.json", "all": "*.json*"}
    checkpoints = [hostile(base / "q", base / kind, "loopq.json", pattern) for kind, pattern in kinds.items()]
    return [*checkpoints, hostile(base / "d", base / "dump", "manifest.json", "*.json")]


def test_every_command_gets_strings_of_strangers():
    commands = parser()._subparsers._group_actions[0].choices
    # The demo opens nothing.
    assert set(LINES) == set(commands) - {"demo"}


@pytest.mark.parametrize("name", LINES)
def test_no_string_of_a_checkpoint_is_obeyed(strangers, saved_model, tmp_path, command, name):
    wrong = []
    for number, folder in enumerate(strangers):
        for line in LINES[name]:
            it = shutil.copytree(folder, tmp_path / str(number) / folder.name, dirs_exist_ok=True)
            code, out, err = command(
                *line.format(it=it, model=saved_model, out=tmp_path / str(number)).split()
            )
            if code not in (0, 1, 2) or OBEYED.search(out + err) or "\nforged" in out + err:
                wrong.append((folder.name, line, out, err))
    assert wrong == []
    for page in tmp_path.rglob("*.html"):
        assert "<script>x" not in page.read_text()
    for card in tmp_path.rglob("README.md"):
        text = card.read_text()
        assert not OBEYED.search(text)
        # JSON in a block of code holds what it holds.
        assert "<script" not in re.sub("```json.*?```", "", text, flags=re.DOTALL)
        assert text.count("```") == 6
    assert name != "card" or list(tmp_path.rglob("README.md"))


def test_an_evaluation_and_its_page_hold_no_markup(saved_model, quantized, tmp_path, command):
    whole = read_any(quantized)
    name, layer = next(iter(whole.layers.items()))
    other = layer.with_report(method_done=EVIL)
    write_as(tmp_path / "q", dataclasses.replace(whole, layers={**whole.layers, name: other}), "native")
    page = tmp_path / "page.html"
    words = ("--n-prompts", 1, "--seq-len", 8, "--html", page)
    code, out, err = command("evaluate", saved_model, tmp_path / "q", *words)
    assert code == 0, err
    assert not OBEYED.search(out + err)
    assert "<script>x" not in page.read_text()


def test_a_card_of_a_hostile_name_is_text(quantized, tmp_path):
    whole = read_any(quantized)
    write_as(tmp_path / "q", whole, "native")
    text = write_card(tmp_path / "q", "a<script>x</script>", None, (), {}).read_text()
    assert "<script" not in text.replace("loopq quantize 'a<script>x</script>'", "")


@pytest.mark.parametrize("module", ["commands", "analysis", "runtime", "paper", "cli.py"])
def test_commands_print_through_one_function(module):
    import loopq

    place = Path(loopq.__file__).parent / module
    files = [place] if place.is_file() else place.rglob("*.py")
    found = [str(f) for f in files if re.search(r"(?<![\w.>` ])\s+print\((?!model\))", f.read_text())]
    assert found == []
