"""Write formats/engines.md out of the rules that `loopq export --engine` checks: `python docs/engines.py`."""

from __future__ import annotations

from pathlib import Path

from loopq.formats.rules import DATE, READS, RULES, RUNS, WHY_NOT
from loopq.systems import SYSTEMS

FILE = Path(__file__).parent / "formats" / "engines.md"
HEAD = """# Which engine takes which file

```console
$ loopq export Q --format compressed-tensors --out Q-ct --engine vllm
```

`--engine` refuses a file that the engine is known to refuse or to load wrongly. It does so before it writes
anything. The message names the layer, the version and what to do.

Engines change. The tables are of {date}, and say how each line is known. "Run" means loaded by the library
itself and compared. "Source read" means that nobody has run it here. No GPU has run any of these files. `python
docs/engines.py` writes this page from the rules that the option checks.
"""


def page() -> str:
    """Return the page."""
    names = sorted(name for name, system in SYSTEMS if system.__module__.startswith("loopq."))
    lines = [HEAD.format(date=DATE), "## Formats\n", "| engine | reads |", "| --- | --- |"]
    lines += [f"| {engine} | {', '.join(f'`{f}`' for f in formats)} |" for engine, formats in READS.items()]
    lines += [
        "",
        "`native` needs "
        "[`import loopq.integrations.transformers`](interop.md#transformers-from-the-native-checkpoint).",
        "",
    ]
    lines += [
        "## What is refused\n",
        "| engine | format | not taken | instead | known from |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {', '.join(r.engines)} | {', '.join(f'`{f}`' for f in r.formats)} | {r.what} | {r.instead} | {r.known} |"
        for r in RULES
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
    return "\n".join([*lines, ""])


def _cell(engine: str, system: str) -> str:
    runs = RUNS[engine].get(system)
    return runs if runs else f"no: {WHY_NOT.get((engine, system), 'not known')}"


if __name__ == "__main__":
    FILE.write_text(page(), "utf-8")
