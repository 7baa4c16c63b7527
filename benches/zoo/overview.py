"""Write the table of trained models into ``docs/zoo.md`` from their ``measured.json``."""

from __future__ import annotations

import json
from pathlib import Path

from benches.pages import into
from benches.zoo import CARDS, WEIGHTS

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs" / "zoo.md"
FOLDERS = (REPOSITORY / "python" / "loopq" / "zoo" / "weights", WEIGHTS, CARDS)
MARK = "trained models"


def table() -> str:
    """Return the table as Markdown, one row per trained model."""
    rows = [
        "| name | parameters | N | bits per byte at N = 1 | N / 2 | N |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted((p for f in FOLDERS for p in f.glob("*/measured.json")), key=lambda p: p.parent.name):
        measured = json.loads(path.read_text(encoding="utf-8"))
        bits, full = measured["bits_per_byte"], measured["full_depth"]
        looped = measured["recipe"]["margin"] is not None
        half = f"{bits[str(full // 2)]:.3f}" if looped else ""
        rows.append(
            f"| {path.parent.name} | {measured['n_parameters']:,} | {full} | {bits['1']:.3f} | {half} | "
            f"{bits[str(full)]:.3f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Replace what stands between the two marks."""
    into(DOCUMENT, MARK, table())


if __name__ == "__main__":
    main()
