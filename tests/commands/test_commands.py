"""What all commands have in common: their options and their help."""

from __future__ import annotations

import pytest

from loopq.cli import parser
from loopq.commands import COMMANDS


def subparsers():
    """The parser of every command by its name."""
    return parser()._subparsers._group_actions[0].choices


def test_the_usage_of_every_command_is_what_it_cannot_do_without():
    usages = {name: " ".join(sub.format_usage().split()) for name, sub in subparsers().items()}
    assert usages["quantize"] == "usage: loopq quantize MODEL --out DIR [options]"
    assert usages["evaluate"] == "usage: loopq evaluate MODEL [DIR ...] [options]"
    assert usages["systems"] == "usage: loopq systems [MODEL ...]"
    assert list(usages).index("merge") == list(usages).index("collect") + 1


def test_help_shows_the_options_that_most_runs_need_with_their_defaults(command):
    code, text, _ = command("quantize", "--help")
    assert code == 0
    words = " ".join(text.split())
    assert "input columns that share a scale; -1: one scale per output row (default 128)" in words
    assert "all | first | 0:8 | 31 | 1:" in words
    assert "--act-order" not in text
    assert "`loopq quantize --help-all` explains these options and" in text
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert 12 <= len(shown) <= 15
    assert shown[:2] == ["--out", "--preset"]


def test_help_all_shows_every_option_once_in_its_group(command):
    code, text, _ = command("quantize", "--help-all")
    assert code == 0
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    options = [a.option_strings[0] for a in subparsers()["quantize"]._actions if a.option_strings]
    assert sorted(shown) == sorted(o for o in options if o != "-h")
    words = " ".join(text.split())
    assert "(default 128)" in words
    assert "method gptq, gptq-cd, trellis: --damping X" in words
    assert "how bits are divided between layers: --allocate BUDGET" in words
    # What is off, or the model's own, has no default to show.
    assert "default None" not in text
    assert "default none)" in text.partition("--rotation KIND")[2]
    assert text.count("default none") == 1


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_every_option_of_every_command_is_explained_in_one_way(name):
    for action in subparsers()[name]._actions:
        text = action.help
        assert text, action
        assert not text.endswith("."), text
        assert "`" not in text or text.count("`") % 2 == 0, text
        assert text[0].islower() or text[1].isupper(), text


def test_the_list_of_commands_has_one_line_each(command):
    code, text, _ = command("--help")
    assert code == 0
    listed = text.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(subparsers())
    assert text.startswith("usage: loopq COMMAND [options]")
    assert command("--version")[1].startswith("loopq ")
