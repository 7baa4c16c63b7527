"""Every option that a message names exists in the command that the message names."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from loopq.cli import parser
from tests.house import counts, raised, rust
from tests.support.interpreters import python

#: Options of other programs that a message names, by program.
ELSEWHERE = {
    "vllm": {"--tensor-parallel-size"},
    "llama-perplexity": {"--kl-divergence"},
    "llama-quantize": {"--imatrix"},
    "pip": {"--upgrade"},
    "sglang": {"--model-path"},
}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_COMMAND = re.compile(r"`loopq ([^`]*)`")


def texts() -> Iterator[tuple[str, str]]:
    """Each string of the package and the core that is no docstring, with its place; parts of a message are joined."""
    for module in counts.modules():
        documents = {
            id(node.body[0].value)
            for node in module.nodes
            if isinstance(node, ast.Module | ast.ClassDef | counts.Function)
            and ast.get_docstring(node, clean=False) is not None
        }
        parts = {
            id(p) for n in module.nodes if isinstance(n, ast.JoinedStr) for p in ast.walk(n) if p is not n
        }
        for node in module.nodes:
            if id(node) in documents or id(node) in parts:
                continue
            if isinstance(node, ast.JoinedStr):
                pieces = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                yield f"{module.name}:{node.lineno}", "".join(pieces)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{module.name}:{node.lineno}", node.value
    for path in sorted(p for crate in rust.CRATES for p in (rust.ROOT / "rust" / crate).rglob("*.rs")):
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text("utf-8")):
            yield path.name, text


def options() -> dict[str, set[str]]:
    """Options of each command, those before a command under the empty name."""
    top = parser()
    (commands,) = top._subparsers._group_actions
    return {
        "": set(top._option_string_actions),
        **{name: set(sub._option_string_actions) for name, sub in commands.choices.items()},
    }


def wrong(text: str, known: dict[str, set[str]]) -> set[str]:
    """Options of a text that no parser knows, and options that the named command does not have."""
    options = set(_OPTION.findall(text)) - set().union(*known.values(), *ELSEWHERE.values())
    for command in _COMMAND.findall(text):
        name = command.split()[0] if command and not command.startswith("-") else ""
        # `loopq COMMAND` stands for any command.
        if not name.isupper():
            options |= set(_OPTION.findall(command)) - known.get(name, set())
    return options


def test_each_option_that_a_message_names_exists():
    known, seen, bad = options(), 0, {}
    for place, text in texts():
        seen += bool(_OPTION.search(text))
        if unknown := wrong(text, known):
            bad[place] = sorted(unknown)
    assert not bad, "no parser has these options; one of another program belongs into ELSEWHERE"
    assert seen > 100


def test_an_option_of_another_command_is_found():
    known = {"": {"--register"}, "run": {"--seed"}, "quantize": {"--bits"}}
    assert wrong("pass --bit or --bits", known) == {"--bit"}
    assert wrong("`loopq run --bits 4`", known) == {"--bits"}
    assert wrong("`loopq --bits 4 run`", known) == {"--bits"}
    assert not wrong("`loopq run --seed 4` or `loopq --register FILE`", known)


def test_options_of_other_programs_are_named_somewhere():
    named = {option for _, text in texts() for option in _OPTION.findall(text)}
    assert set().union(*ELSEWHERE.values()) <= named


def test_a_raise_is_noted_in_any_process(tmp_path, monkeypatch):
    path = [str(raised.HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("LOOPQ_RAISED", str(tmp_path / "raised"))
    python(
        "import contextlib; from loopq.layers.loop_spec import parse_spec\n"
        "for text in ('looped:', 'looped:', 'plain'):\n    with contextlib.suppress(ValueError): parse_spec(text)"
    )
    (place,) = (tmp_path / "raised").read_text().splitlines()
    assert place == "layers.loop_spec: parse_spec 1"
    assert "write looped:MODEL" in raised.messages()[place]
