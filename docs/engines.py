"""Write formats/engines.md from the table that loopq reads and the record of all pairs: `python docs/engines.py`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from loopq.formats.rules import Rule, rules
from loopq.formats.support import DATE, ENTRIES, NOWHERE, READS, Support

FILE = Path(__file__).parent / "formats" / "engines.md"
RECORD = Path(__file__).parents[1] / "benches" / "record" / "engines.json"
HEAD = """# Which engine takes which file

```console
$ loopq export Q --format compressed-tensors --out Q-ct
```

`export` and `quantize --format` refuse a file that no engine reads right, before the work. If one engine reads a file
wrong without an error, name the engine that the file is for: `--for NAME`. This option also refuses what the engine is
known to refuse. `--force` writes the file all the same, and says so in it.

Then each installed engine that reads the format loads the file in a separate process. Its logits of random tokens
must be those of loopq at the model's own depth, up to rounding, or the file is removed. `--verify no` asks no engine.
loopq itself is the engine of its embedded models.

Engines change, so the tables have a date: {date}. "Run" means that the library itself loaded the file and was compared.
"Source read" means that nobody has run it here. No GPU has run any of these files.

## Formats

| engine | reads |
|---|---|
{reads}

`native` needs loopq beside the engine: [transformers](interop.md#transformers-from-the-native-checkpoint) with
`import loopq.runtime.transformers`, or [vLLM on a CPU](interop.md#vllm-on-a-cpu) with loopq's plugin. `--for NAME`
checks such files before the work, and the engine is not asked afterwards.

## What is refused

The error names the layer, the version and source of this knowledge, and what to do instead.

| engine | formats | not taken |
|---|---|---|
{refused}
| llama.cpp | `gguf` | grids that are no [type of llama.cpp](gguf.md) |

## Systems

The first row that fits holds. A system without a row of an engine is refused for it. No engine has
the classes of {nowhere}.

| engine | systems | who runs them, or why not |
|---|---|---|
{systems}

## All pairs

Tiny random models, read by the engines that were installed. A number is the largest difference between an engine's logits and loopq's. GPTQ's kernels round to float16, and llama.cpp rounds activations to 8 bits. `-` is a file
that loopq refuses, or that no installed engine reads. `python -m tests.support.pairs` makes
[the record](../../benches/record/engines.json), which also has mixed grids, biases and other widths.
Engines: {versions}.

{pairs}
"""


def page() -> str:
    """Return the page."""
    record = json.loads(RECORD.read_text("utf-8"))
    text = HEAD.format(
        date=DATE,
        reads="\n".join(f"| {engine} | {_code(formats)} |" for engine, formats in READS.items()),
        refused="\n".join(f"| {', '.join(r.engines)} | {_formats(r)} | {r.what} |" for r in rules()),
        nowhere=" and ".join((_code(NOWHERE[:-1]), _code(NOWHERE[-1:]))),
        systems="\n".join(_systems()),
        versions=", ".join(sorted({r["engine"] for p in _all(record) for r in p["readings"].values()})),
        pairs="\n".join(_pairs(record)),
    )
    wrap = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    blocks = text.strip().split("\n\n")
    return "\n\n".join(b if b.startswith(("|", "#", "```")) else wrap.fill(b) for b in blocks) + "\n"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _formats(rule: Rule) -> str:
    every = {name for engine in rule.engines for name in READS[engine]}
    return "any" if every == set(rule.formats) else _code(rule.formats)


def _systems() -> list[str]:
    """A row for entries of an engine that say the same."""
    about: dict[tuple[str, str], list[str]] = {}
    for engine in READS:
        for entry in (e for e in ENTRIES if e.engine == engine):
            runs = "" if entry.runs else "no, without an error: " if entry.silent else "no: "
            about.setdefault((engine, f"{runs}{entry.how} ({entry.known})"), []).append(_about(entry))
    return [f"| {engine} | {'; '.join(systems)} | {how} |" for (engine, how), systems in about.items()]


def _about(entry: Support) -> str:
    code = ("with code",) if entry.code else ()
    only = ", ".join((*(f"`{name}`" for name in entry.formats), *entry.kinds, *code))
    return f"{_code(entry.systems)}{f' ({only})' if only else ''}"


def _all(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [pair for forms in record.values() for pair in forms.values()]


def _pairs(record: dict[str, Any]) -> list[str]:
    """A row for each model that an engine read in some format; variants of a model are in the record alone."""
    rows = {}
    for name, found in record.items():
        is_variant = ", " in name and not name.endswith((", code", ", dense experts", ", head"))
        if not is_variant and name.count(",") < 2:
            rows[name] = {form: cell for form, pair in found.items() if (cell := _pair(pair))}
    forms = [form for form in next(iter(record.values())) if any(form in row for row in rows.values())]
    lines = [f"| model | {' | '.join(f'`{f}`' for f in forms)} |", f"|---|{'---|' * len(forms)}"]
    return lines + [
        f"| {name} | {' | '.join(row.get(form, '-') for form in forms)} |"
        for name, row in rows.items()
        if row
    ]


def _pair(pair: dict[str, Any]) -> str:
    read = {engine: pair["readings"].get(engine, {}) for engine in (*pair["engines"], *pair["named"])}
    return ", ".join(
        f"{engine} {reading['difference']:.1g}"
        for engine, reading in read.items()
        if reading.get("difference") is not None
    )


if __name__ == "__main__":
    FILE.write_text(page(), "utf-8")
