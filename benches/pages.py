"""Where results go: the folder of records, and tables in the pages of docs between two marks with their name."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benches" / "record"


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
