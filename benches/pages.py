"""Where results go: the folder of records, and tables in the pages of docs between two marks with their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benches" / "record"


def json_lines(data: Any, depth: int = 2) -> str:
    """Text of a JSON file that breaks lines down to this depth, so that each row of a record is one line."""
    if not depth or not data or not isinstance(data, (dict, list)):
        return json.dumps(data, separators=(",", ":"))
    if isinstance(data, list):
        return "[\n" + ",\n".join(json_lines(value, depth - 1) for value in data) + "\n]"
    rows = (f"{json.dumps(key)}:{json_lines(value, depth - 1)}" for key, value in data.items())
    return "{\n" + ",\n".join(rows) + "\n}"


def into(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of a name."""
    head, _, tail = _parts(page, name)
    page.write_text(f"{head}\n{text}\n{tail}", "utf-8")


def within(page: Path, name: str) -> str:
    """The text between the marks of a name."""
    return _parts(page, name)[1].strip("\n")


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    """Text up to the first mark, between both, and from the second mark on."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text("utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{page}: no {begin} ... {end}; write both where the table belongs")
    head, _, rest = text.partition(begin)
    between, _, tail = rest.partition(end)
    return head + begin, between, end + tail
