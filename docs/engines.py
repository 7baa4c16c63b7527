"""Write formats/engines.md from the table that loopq reads and the record of all pairs: `python docs/engines.py`."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
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
wrong without an error, name the engine that the file is for: `--for NAME`. `--force` writes the file all the same, and
says so in it. Then each installed engine that reads the format loads the file. Its logits of random tokens must be
those of loopq, up to rounding, or the file is removed. `--verify no` asks no engine.

The tables are of {date}. "Run" means that the library itself loaded the file and was compared. "Source read" means that
nobody has run it. No GPU has run any of these files.

| engine | reads |
|---|---|
{reads}

`native` needs loopq beside [transformers](interop.md#transformers-from-the-native-checkpoint) or
[vLLM on a CPU](interop.md#vllm-on-a-cpu), and these are not asked afterwards. The pairs below were shown to
transformers.

## What is refused

The error names the layer, the version and source of this knowledge, and what to do instead.

| engine | formats | not taken |
|---|---|---|
{refused}
| llama.cpp | `gguf` | grids that are no [type of llama.cpp](gguf.md) |

## Systems

A system without a row of an engine and a format is refused for them, with the reason. No engine has the classes of
{nowhere}.

| engine | systems, and what runs them |
|---|---|
{systems}

## All pairs

`python -m tests.support.pairs` writes tiny random models in every format and asks the engines that are installed. [The
record](../../benches/record/engines.json) has each result. GPTQ's kernels round to float16, and llama.cpp rounds
activations to 8 bits.

{counts}

| engine | format | models read | largest difference of a logit |
|---|---|---|---|
{pairs}
"""


def page() -> str:
    """Return the page."""
    record = json.loads(RECORD.read_text("utf-8"))["pairs"]
    text = HEAD.format(
        date=DATE,
        reads="\n".join(f"| {engine} | {_code(formats)} |" for engine, formats in READS.items()),
        refused="\n".join(_refused()),
        nowhere=" and ".join((_code(NOWHERE[:-1]), _code(NOWHERE[-1:]))),
        systems="\n".join(_systems()),
        pairs="\n".join(_pairs(record)),
        counts=_counts([pair for forms in record.values() for pair in forms.values()]),
    )
    wrap = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    blocks = text.strip().split("\n\n")
    return "\n\n".join(b if b.startswith(("|", "#", "```")) else wrap.fill(b) for b in blocks) + "\n"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _refused() -> list[str]:
    """A row for rules of the same engines and formats."""
    about: dict[tuple[str, str], list[str]] = {}
    for rule in rules():
        about.setdefault((", ".join(rule.engines), _formats(rule)), []).append(rule.what)
    return [f"| {engines} | {formats} | {'<br>'.join(what)} |" for (engines, formats), what in about.items()]


def _formats(rule: Rule) -> str:
    every = {name for engine in rule.engines for name in READS[engine]}
    return "any" if every == set(rule.formats) else _code(rule.formats)


def _systems() -> list[str]:
    """A row for each engine, with a line for what runs some systems."""
    about: dict[tuple[str, str], list[str]] = {}
    for engine in READS:
        for entry in (e for e in ENTRIES if e.engine == engine and e.runs):
            by_formats: dict[tuple[str, ...], list[str]] = {}
            for system in entry.systems:
                by_formats.setdefault(_left(entry, system), []).append(system)
            for formats, systems in by_formats.items():
                code = ("with code",) if entry.code else ()
                only = ", ".join(
                    (*(() if formats == READS[engine] else (_code(formats),)), *entry.kinds, *code)
                )
                how = about.setdefault(
                    (engine, f"{entry.how.replace(' (loopq.runtime.vllm)', '')} ({entry.known})"), []
                )
                how.append(f"{_code(tuple(systems))}{f' ({only})' if only else ''}")
    rows = {
        engine: [f"{'; '.join(s)}: {how}" for (e, how), s in about.items() if e == engine] for engine in READS
    }
    return [f"| {engine} | {'<br>'.join(lines)} |" for engine, lines in rows.items()]


def _left(entry: Support, system: str) -> tuple[str, ...]:
    """Formats of an entry that no earlier one decides: the first that fits holds."""
    earlier = ENTRIES[: ENTRIES.index(entry)]
    taken = {
        name
        for e in earlier
        if (e.engine == entry.engine and system in e.systems)
        and (not e.kinds or set(entry.kinds or ("",)) <= set(e.kinds))
        and (not e.code or entry.code)
        for name in e.formats or READS[e.engine]
    }
    return tuple(n for n in READS[entry.engine] if n in (entry.formats or (n,)) and n not in taken)


def _pairs(record: dict[str, Any]) -> list[str]:
    """A row for each engine and format: how many models it read, and the largest difference."""
    found: dict[tuple[str, str], list[float]] = {}
    for forms in record.values():
        for form, pair in forms.items():
            for engine in (*pair["engines"], *pair["named"]):
                reading = pair["readings"].get(engine)
                if reading and reading["difference"] is not None:
                    found.setdefault((reading["engine"], form), []).append(reading["difference"])
    return [
        f"| {engine} | `{form}` | {len(values)} | {max(values):.1g} |"
        for (engine, form), values in sorted(found.items())
    ]


def _counts(pairs: list[dict[str, Any]]) -> str:
    """Pairs by what loopq does with them, and readings by what the engine made of the file."""
    refused = [pair for pair in pairs if pair["refused"]]
    named = sum(bool(pair["named"]) for pair in refused)
    found: Counter[str] = Counter()
    for pair in pairs:
        right = (*pair["engines"], *pair["named"])
        for engine, reading in pair["readings"].items():
            same = reading["difference"] is not None and reading["difference"] <= reading["allowed"]
            found["refused" if engine not in right else "equal" if same else "wrong"] += not reading[
                "skipped"
            ]
    return (
        f"Of {len(pairs)} pairs loopq writes {len(pairs) - len(refused)}, another {named} for a named engine alone, "
        f"and refuses {len(refused) - named} with the reason. Engines read "
        f"{found['equal']} of the files that loopq writes, equal up to rounding, and {found['wrong']} not. Of the "
        f"refused ones {found['refused']} were written by force and shown to an engine: it raised an error or gave "
        "other logits."
    )


if __name__ == "__main__":
    FILE.write_text(page(), "utf-8")
