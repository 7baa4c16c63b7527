"""Write formats/engines.md from the table that loopq reads and the record of all pairs: `python docs/engines.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loopq.formats.rules import rules
from loopq.formats.support import DATE, ENTRIES, NOWHERE, READS
from loopq.systems import SYSTEMS

FILE = Path(__file__).parent / "formats" / "engines.md"
RECORD = Path(__file__).parents[1] / "benches" / "record" / "engines.json"
HEAD = """# Which engine takes which file

```console
$ loopq export Q --format compressed-tensors --out Q-ct
```

loopq refuses a file that no engine reads right, with the reasons, before the work. `quantize --format` does so too. A
file that one engine reads wrong without an error is written only for an engine that you name: `--for NAME`. That
option also refuses what the engine is known to refuse or to load wrongly. `--force` writes the file all the
same, and says so in it. loopq itself is the engine of its embedded models, and its reading is the comparison. Scales of
AWQ are [folded into the layers before](scales.md#scales-of-awq-in-other-formats), so no engine needs to know them.

Then every engine that reads the format and is installed here loads the file in a process of its own. Its logits of
random tokens must be those of loopq at the model's own depth, up to rounding, or the file is removed. Both sides begin
with the same first states where the model draws them (Huginn, R-Llama). `--verify no` asks no engine.

Engines change. The tables are of {date}, and say how each line is known. "Run" means loaded by the library
itself and compared. "Source read" means that nobody has run it here. No GPU has run any of these files. `python
docs/engines.py` writes this page from the table that loopq reads and from the record of all pairs.
"""
PAIRS = """## All pairs

Tiny random models in every format. A number is the largest difference between an engine's logits and loopq's. `python
-m tests.support.pairs` makes the record, and `tests/formats/engines/test_pairs.py` checks it.
"""


def page() -> str:
    """Return the page."""
    names = sorted(name for name, system in SYSTEMS if system.__module__.startswith("loopq."))
    lines = [HEAD.format(date=DATE), "## Formats\n", "| engine | reads |", "| --- | --- |"]
    lines += [f"| {engine} | {', '.join(f'`{f}`' for f in formats)} |" for engine, formats in READS.items()]
    lines += [
        "",
        "`native` needs loopq installed beside the engine: "
        "[`import loopq.runtime.transformers`](interop.md#transformers-from-the-native-checkpoint), or its plugin "
        "for [vLLM on a CPU](interop.md#vllm-on-a-cpu), with one process. The plugin ran Ouro and a looped Llama. "
        "`--for NAME` checks such files before the work. They are not shown to the engine afterwards.",
        "",
    ]
    lines += [
        "## What is refused\n",
        "| engine | format | not taken | instead | known from |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {', '.join(r.engines)} | {', '.join(f'`{f}`' for f in r.formats)} | {r.what} | {r.instead} | {r.known} |"
        for r in rules()
    ]
    lines += [
        "| llama.cpp | `gguf` | what is no type of llama.cpp | "
        "`--bits 4 --group-size 32` | [gguf.md](gguf.md): types of llama.cpp |",
        "",
        "## Systems\n",
        f"| system | {' | '.join(READS)} |",
        f"| --- |{' --- |' * len(READS)}",
    ]
    lines += [f"| `{name}` | {' | '.join(_cell(engine, name) for engine in READS)} |" for name in names]
    return "\n".join([*lines, "", *_pairs(), ""])


def _cell(engine: str, system: str) -> str:
    found = [e for e in ENTRIES if e.engine == engine and system in e.systems]
    if system in NOWHERE:
        return "no: no engine has the class"
    return "; ".join(map(_entry, found)) or "no: not known"


def _entry(entry: Any) -> str:
    about = [*(f"`{name}`" for name in entry.formats), *entry.kinds]
    where = f"{', '.join(about)}: " if about else ""
    runs = "" if entry.runs else "no, without an error: " if entry.silent else "no: "
    return f"{runs}{where}{entry.how} ({entry.known})"


def _pairs() -> list[str]:
    record = json.loads(RECORD.read_text("utf-8"))
    forms = list(next(iter(record.values())))
    head = [PAIRS, f"| model | {' | '.join(f'`{f}`' for f in forms)} |", f"| --- |{' --- |' * len(forms)}"]
    return head + [f"| {name} | {' | '.join(map(_pair, found.values()))} |" for name, found in record.items()]


def _pair(pair: dict[str, Any]) -> str:
    if pair["refused"]:
        wrong = ", ".join(_reading(r) for e, r in pair["readings"].items() if e not in pair["named"])
        named = "".join(f"; `--for {e}`: {_known(pair, e)}" for e in pair["named"])
        return f"refused{f' ({wrong})' if wrong else ''}{named}"
    return (
        "; ".join(f"{engine}: {_known(pair, engine)}" for engine in pair["engines"]) or "no engine opens it"
    )


def _known(pair: dict[str, Any], engine: str) -> str:
    return _reading(pair["readings"][engine]) if engine in pair["readings"] else "not run"


def _reading(reading: dict[str, Any]) -> str:
    if reading["difference"] is None:
        return f"{reading['engine']}: {'not asked' if reading['skipped'] else 'an error'}"
    return f"{reading['engine']}: {reading['difference']:.1g}"


if __name__ == "__main__":
    FILE.write_text(page(), "utf-8")
