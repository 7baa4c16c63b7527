"""Write the list of tables and figures into ``docs/paper.md`` from the registry: ``python -m benches.paper``."""

from __future__ import annotations

import inspect
from pathlib import Path

from benches.pages import into
from loopq.paper.shown import TABLES, order

MARK = "tables"
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "paper.md"


def table() -> str:
    """Return one row for each figure and table, in the paper's order, as Markdown."""
    rows = ["| in the paper | what it holds | command | in the package |", "|---|---|---|---|"]
    entries = [(label, name, entry) for name, entry in TABLES for label in entry.labels]
    for label, name, entry in sorted(entries, key=lambda row: order(row[0])):
        file = Path(inspect.getfile(entry.measure or entry.show)).stem
        model = " MODEL ..." if entry.measure else ""
        also = "" if label == "Appendix J" else f" or `{label.lower().replace(' ', '-')}`"
        rows.append(
            f"| {label} | {entry.title} | `loopq reproduce {name}{model}`{also} | `paper/tables/{file}.py` |"
        )
    return "\n".join(rows)


def main() -> None:
    """Replace what stands between the two marks."""
    into(DOCUMENT, MARK, table())


if __name__ == "__main__":
    main()
