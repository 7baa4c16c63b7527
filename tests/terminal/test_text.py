"""Text from others: no command hands a terminal, a card or a page what these would obey."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest

from loopq.analysis.report.card import write_card
from loopq.analysis.report.markup import markdown
from loopq.errors import LoopqError
from loopq.formats.convert import read_any, write_as
from loopq.terminal.text import say, visible

EVIL = "\x1b]0;x\x07\x9b2J\r<script>x</script>`[x](y:z)\nforged"
#: What no terminal may get.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_text_is_shown_and_not_obeyed(capsys):
    assert visible("naïve 数\n\ta") == "naïve 数\n\ta"
    assert visible("\x1b[2J\x9b\r\u202e\udcff") == r"\x1b[2J\x9b\r\u202e\udcff"
    assert visible("a\nb\tc", one_line=True) == r"a\nb\tc"
    say(EVIL)
    assert not OBEYED.search(capsys.readouterr().out)


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


#: Commands that print strings of each kind.
COMMANDS = {
    "settings": (("inspect",), ("card",)),
    "report": (("inspect",), ("inspect", "--json")),
    "side file": (("check",), ("card",)),
}


def checkpoints(source: Path, out: Path):
    """The same checkpoint with one string of its settings, reports or side files changed, if loopq writes that."""
    whole = read_any(source)
    settings = json.loads(json.dumps(whole.settings))
    name, layer = next(iter(whole.layers.items()))
    report = json.loads(json.dumps(layer.report))
    variants = [
        ("settings", dataclasses.replace(whole, settings=changed(settings, at))) for at in places(settings)
    ]
    for at in places(report):
        other = layer.with_report(**changed(report, at))
        variants.append(("report", dataclasses.replace(whole, layers={**whole.layers, name: other})))
    for file, data in whole.side_files.items():
        if file.endswith(".json"):
            config = json.loads(data)
            for at in places(config):
                files = {**whole.side_files, file: json.dumps(changed(config, at)).encode()}
                variants.append(("side file", dataclasses.replace(whole, side_files=files)))
    for number, (kind, variant) in enumerate(variants):
        try:
            write_as(out / str(number), variant, "native")
        except LoopqError:
            continue
        yield kind, out / str(number)


def test_no_string_of_a_checkpoint_reaches_terminal_or_card(quantized, tmp_path, command):
    seen, wrong = 0, []
    for kind, folder in checkpoints(quantized, tmp_path):
        for words in COMMANDS[kind]:
            code, out, err = command(*words, folder)
            if code not in (0, 1, 2) or OBEYED.search(out + err) or "\nforged" in out + err:
                wrong.append((kind, words, out, err))
        card = folder / "README.md"
        if card.exists():
            seen += 1
            text = card.read_text()
            assert not OBEYED.search(text)
            # JSON in a block of code holds what it holds.
            assert "<script" not in re.sub("```json.*?```", "", text, flags=re.DOTALL)
            assert text.count("```") == 6
    assert seen
    assert wrong == []


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
