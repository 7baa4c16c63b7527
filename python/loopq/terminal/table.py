"""Tables for a terminal with aligned columns. Numbers are on the right."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.terminal.text import visible


def render(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as text.

    Parameters
    ----------
    header : sequence of str
        Column heads.
    rows : sequence of sequences
        Cells. None is shown as a dash. A column that contains only numbers or dashes is right-aligned.
    """
    cells = [["-" if c is None else visible(c, one_line=True) for c in row] for row in rows]
    widths = [
        max(len(head), *(len(row[i]) for row in cells)) if cells else len(head)
        for i, head in enumerate(header)
    ]
    right = [all(_is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(header), rule, *(line(row) for row in cells)])


def _is_number(cell: str) -> bool:
    return (
        cell == "-"
        or cell.lstrip("+-").replace(".", "", 1).rstrip("%x").replace("e-", "").replace("e+", "").isdigit()
    )


def size(n_bytes: float) -> str:
    """Format a number of bytes. kB, MB and GB are powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes:.0f} B"


def some(names: Sequence[str], most: int = 12) -> str:
    """Return names in one line, and the number of those after the first ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def short(value: float | None, digits: int = 3) -> str | None:
    """Format a number with a few significant digits. None stays None."""
    return None if value is None else f"{value:.{digits}g}"
