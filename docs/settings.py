"""Write settings.md out of the settings' own declarations: `python docs/settings.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loopq.calibrate.prompts import CalibrationTake
from loopq.commands.options import flag_of, group_title, metavar_of, text_of
from loopq.diagnosis.config import DiagnoseConfig
from loopq.inference.generate import Generation
from loopq.quantizers.config import LayerConfig
from loopq.run.config import PRESETS, PROMPTS, QuantConfig
from loopq.settings.declare import Leaf, Settings, leaves, lowered
from loopq.settings.execution import Execution

FILE = Path(__file__).with_name("settings.md")
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
    """What is shown of a setting; of one whose option turns it off, what it is and what it is then."""
    leaf = entries[0]
    return (
        f"{lowered(leaf.help.removesuffix('.'))} (default true)" if leaf.default is True else text_of(entries)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    FILE.write_text(page(), "utf-8")
