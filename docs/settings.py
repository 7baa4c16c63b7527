"""Write settings.md and the types of keywords out of the settings' declarations: `python docs/settings.py`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.annotations import hints, is_union
from loopq.calibrate.prompts import CalibrationTake, Take
from loopq.commands.options import flag_of, group_title, metavar_of, text_of
from loopq.formats import FORMATS
from loopq.quantizers.config import LayerConfig
from loopq.run.config import PRESETS, PROMPTS, QuantConfig
from loopq.run.gate import Gate, Proof
from loopq.runtime.generate import Generation
from loopq.settings.declare import Leaf, Settings, leaves, lowered
from loopq.settings.execution import Execution

FILE = Path(__file__).with_name("settings.md")
KEYWORDS = Path(__file__).parents[1] / "python" / "loopq" / "run" / "keywords.py"
HEAD = """# Settings

Every setting has one name. It is a keyword in Python (`loopq.quantize(model, bits=3)`) and an option (`--bits
3`). A setting of a layer is also a name in `--layer 'PATTERN=>bits=3'` and in `Override`. loopq refuses a
setting that nothing reads. `python docs/settings.py` writes this page from the declarations of the settings.
`--help-all` of a command prints the same.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD, *_presets(), *_section("Of a layer", LayerConfig)]
    parts += _section("Of a run", QuantConfig, without=leaves(LayerConfig))
    parts += _section("Of the prompts", CalibrationTake) + _section("Of the work", Execution)
    parts += _section("Of a diagnosis", DiagnoseConfig) + _section("Of generated text", Generation)
    return "\n".join(parts)


def _presets() -> Iterator[str]:
    yield "## Presets\n\n| preset | settings |\n| --- | --- |"
    for name, values in PRESETS.items():
        shown = {**values, **PROMPTS.get(name, {})}
        yield f"| `{name}` | " + ", ".join(f"`{key}={value}`" for key, value in shown.items()) + " |"
    yield ""


def _section(title: str, kind: type[Settings], without: dict[str, list[Leaf]] | None = None) -> list[str]:
    groups: dict[str, list[list[Leaf]]] = {}
    for name, entries in leaves(kind).items():
        if name not in (without or {}):
            groups.setdefault(group_title(entries), []).append(entries)
    lines = [f"## {title}\n"]
    for group, found in groups.items():
        lines += [f"### {group[:1].upper()}{group[1:]}\n", "| name | option | what |", "| --- | --- | --- |"]
        lines += [
            f"| `{entries[0].name}` | `{_cell(_option(entries[0]))}` | {_cell(_text(entries))} |"
            for entries in found
        ]
        lines.append("")
    return lines


def _option(leaf: Leaf) -> str:
    return flag_of(leaf) if leaf.annotation is bool else f"{flag_of(leaf)} {metavar_of(leaf)}"


def _text(entries: list[Leaf]) -> str:
    """The shown default of a setting; if an option turns it off, both values."""
    leaf = entries[0]
    return (
        f"{lowered(leaf.help.removesuffix('.'))} (default true)" if leaf.default is True else text_of(entries)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


_MODULE = '''"""Types of the keywords of public functions. `python docs/settings.py` writes this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

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
        ("SolveKeywords", ("ExecutionKeywords",), "`solve`", preset | _typed(QuantConfig)),
        ("QuantizeKeywords", ("SolveKeywords", "TakeKeywords"), "`quantize`", more | _typed(Gate)),
        ("MeasureKeywords", ("TakeKeywords", "ExecutionKeywords"), "`evaluate` and `diagnose`", {}),
        ("GenerateKeywords", ("TypedDict",), "`generate`", _typed(Generation)),
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
