"""Write settings.md and the types of keywords out of the settings' declarations: `python docs/settings.py`."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.annotations import hints, is_union
from loopq.calibrate.prompts import CalibrationTake, Take
from loopq.commands.options import OWN, group_title, option_of
from loopq.commands.settable import metavar_of, text_of
from loopq.formats import FORMATS
from loopq.models.from_python import Opening
from loopq.quantizers.config import LayerConfig
from loopq.run.config import PRESETS, PROMPTS, QuantConfig
from loopq.run.gate import Gate, Proof
from loopq.runtime.generate import Generation
from loopq.settings.declare import Leaf, Settings, leaves
from loopq.settings.execution import Execution

FILE = Path(__file__).with_name("settings.md")
KEYWORDS = Path(__file__).parents[1] / "python" / "loopq" / "run" / "keywords.py"
HEAD = """# Settings

Every setting has one name. It is a keyword in Python (`loopq.quantize(model, beam=64)`), and `--set
beam=64` on the command line. Settings that are changed often have an option of their own, too:
`--group-size 32` is `group_size`. A setting of a layer is also a name in `--layer
'PATTERN=>beam=64'` and in `Override`. loopq refuses a setting that nothing reads.

The tables have options in short, because `loopq COMMAND --help-all` has their full text. Rows
without `--` go with `--set`, which may be repeated and also takes the settings with an option.

* A switch takes `true` or `false`: `--set refit=false`.
* A list is joined by commas: `--set fit_bits=3,4`.
* `none` removes an optional value: `--set scale_bits=none`.
* `--layer` is stronger than `--set` and own options, these than `--preset`, and that than `--like`.
  loopq refuses options that contradict each other, as in `--set bits=3 --bits 4`.

`python docs/settings.py` writes this page from the declarations of the settings.
"""
OTHERS = """## Of a diagnosis and of generated text

| command | options |
| --- | --- |"""
#: Settings that another page explains.
EXPLAINED = {
    **dict.fromkeys(("order", "signed_scales", "beam", "rounds"), "methods.md#gptq-cd"),
    "rotation": "methods.md#rotations", "damping_kind": "methods.md#damping", "state_bits": "methods.md#trellis",
    "step_weights": "methods.md#steps", "scale_bits": "formats/scales.md",
    **dict.fromkeys(("alpha", "sweeps", "field", "template", "random_tokens"), "calibration.md"),
}  # fmt: skip


def page() -> str:
    """Return the page."""
    parts = [HEAD, *_presets(), *_section("Of a layer", LayerConfig, OWN)]
    parts += _section("Of a run", QuantConfig, OWN, without=leaves(LayerConfig))
    parts += _section("Of the prompts", CalibrationTake, OWN) + _section("Of the work", Execution)
    parts += [
        OTHERS,
        *(_names(command, kind) for command, kind in (("diagnose", DiagnoseConfig), ("run", Generation))),
    ]
    return "\n".join(parts) + "\n"


def _presets() -> Iterator[str]:
    yield "## Presets\n\n| preset | settings |\n| --- | --- |"
    for name, values in PRESETS.items():
        shown = {**values, **PROMPTS.get(name, {})}
        yield f"| `{name}` | " + ", ".join(f"`{key}={value}`" for key, value in shown.items()) + " |"
    yield ""


def _section(
    title: str,
    kind: type[Settings],
    own: Sequence[str] | None = None,
    without: dict[str, list[Leaf]] | None = None,
) -> list[str]:
    groups: dict[str, list[list[Leaf]]] = {}
    for name, entries in leaves(kind).items():
        if name not in (without or {}):
            groups.setdefault(group_title(entries), []).append(entries)
    lines = [f"## {title}\n", "| setting | what |", "| --- | --- |"]
    for group, found in groups.items():
        if len(groups) > 1:
            lines.append(f"| **{group[:1].upper()}{group[1:]}** | |")
        lines += [
            f"| `{_cell(_option(entries[0], own))}` | {_cell(_text(entries, own))} |" for entries in found
        ]
    return [*lines, ""]


def _names(command: str, kind: type[Settings]) -> str:
    """The options of a command, which its help explains."""
    names = (f"`{_cell(_option(entries[0], None))}`" for entries in leaves(kind).values())
    return f"| `{command}` | {', '.join(names)} |"


def _option(leaf: Leaf, own: Sequence[str] | None) -> str:
    option = option_of(leaf, own)
    if option.startswith("--set "):
        return f"{leaf.name}={metavar_of(leaf)}"
    return option if leaf.annotation is bool else f"{option} {metavar_of(leaf)}"


def _text(entries: Sequence[Leaf], own: Sequence[str] | None) -> str:
    """The text of a setting. If the help or another page explains it: its first sentence, names and default."""
    text, link = text_of(entries), EXPLAINED.get(entries[0].name, "")
    if not link and option_of(entries[0], own).startswith("--set "):
        return text
    default = re.search(r" \(default [^()]*\)$", text)
    first, *others = re.split(r"(?<=\.) ", text[: default.start()] if default else text)
    kept = [first, *(sentence for sentence in others if sentence.startswith("Names: "))]
    how = f"; [how]({link})" if link else ""
    return " ".join(kept).removesuffix(".") + how + (default[0] if default else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


_MODULE = '''"""Types of the keywords of public functions. `python docs/settings.py` writes this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from loopq.quantizers import Method
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.budget import Fit
from loopq.run.inputs import Inputs
from loopq.terminal.progress import Progress
'''


def keywords() -> str:
    """Return the module with the types of keywords."""
    formats = {option.name: option for _, target in FORMATS for option in target.options}
    texts = {
        name: (_type(Literal[o.choices]) if o.choices else "str") + " | None" for name, o in formats.items()
    }
    preset = {"preset": f"{_type(Literal[tuple(PRESETS)])} | None"}
    take = _typed(Take)
    more = {name: text for name, text in _typed(CalibrationTake).items() if name not in take}
    own = [
        ("ExecutionKeywords", ("TypedDict",), "how a run is carried out", _typed(Execution)),
        ("TakeKeywords", ("TypedDict",), "number and length of prompts", take),
        ("OpeningKeywords", ("TypedDict",), "how a model is opened", _typed(Opening)),
        ("SolveKeywords", ("ExecutionKeywords",), "`solve`", preset | _typed(QuantConfig)),
        (
            "QuantizeKeywords",
            ("SolveKeywords", "TakeKeywords", "OpeningKeywords"),
            "`quantize`",
            more | _typed(Gate),
        ),
        (
            "MeasureKeywords",
            ("TakeKeywords", "ExecutionKeywords", "OpeningKeywords"),
            "`evaluate` and `diagnose`",
            {},
        ),
        ("GenerateKeywords", ("OpeningKeywords",), "`generate`", _typed(Generation)),
        ("ExportKeywords", ("TypedDict",), "`export`", texts | _typed(Gate) | _typed(Proof)),
    ]
    return _MODULE + "".join(map(_class, *zip(*own, strict=True)))


def _class(name: str, bases: Iterable[str], of: str, entries: dict[str, str]) -> str:
    head = f'\n\nclass {name}({", ".join(bases)}, total=False):\n    """Keywords of {of}."""\n'
    return head + "\n" * bool(entries) + "".join(f"    {key}: {text}\n" for key, text in entries.items())


def _typed(kind: type[Settings]) -> dict[str, str]:
    """Return the types of all keywords of some settings: flat names and the fields themselves."""
    found: dict[str, list[str]] = {}
    for name, entries in leaves(kind).items():
        found[name] = [_type(leaf.annotation) for leaf in entries]
        found[name] += [
            _type(hints(leaf.owner)[leaf.path[-1]]) for leaf in entries if "choice" in leaf.metadata
        ]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if "parse" not in field.metadata or not field.metadata["option"]:
            found.setdefault(field.name, []).append(_type(hints(kind)[field.name]))
    return {name: " | ".join(dict.fromkeys(" | ".join(texts).split(" | "))) for name, texts in found.items()}


def _type(annotation: Any) -> str:
    """Return the source of an annotation. Any sequence is taken for a tuple."""
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(repr, members))}]".replace("'", '"')
    if is_union(annotation):
        return " | ".join(map(_type, members))
    if members:
        return f"Sequence[{_type(members[0])}]"
    return "None" if annotation is type(None) else str(annotation.__name__)


if __name__ == "__main__":
    FILE.write_text(page(), "utf-8")
    KEYWORDS.write_text(keywords(), "utf-8")
