"""Li, Table 20: recursive filters with a rounded transition matrix. It needs no model."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.paper.compared import curves
from loopq.paper.controls.iir import BITS, DESIGNS, table
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.report.style import Picture

TITLE = "Stability of recursive filters"
# Largest pole magnitude with A rounded, by filter and bits 4, 6, 8, 10, 12, 16 (Li, Table 20).
PAPER = {
    "Butterworth 4": (2.593, 1.287, 1.134, 1.011, 0.934, 0.916),
    "Chebyshev I, 4": (4.575, 1.441, 1.141, 1.062, 0.950, 0.965),
    "Chebyshev I, 6": (5.645, 1.922, 1.602, 1.202, 1.134, 1.012),
    "Elliptic 4": (4.569, 1.439, 1.140, 1.002, 0.995, 0.967),
}


def show(results: Sequence[Found]) -> Shown:
    """Compute the 24 rows, and the same filters in modal form."""
    rows = table()
    cells = tuple(
        (
            r["filter"], r["form"], str(r["bits"]), f"{r['original']:.3f}", f"{r['a_quantized']:.3f}",
            f"{r['bcd_quantized']:.3f}", "yes" if r["stable"] else "no",
        )
        for r in rows
    )  # fmt: skip
    companion = {(r["filter"], r["bits"]): r["a_quantized"] for r in rows if r["form"] == "companion"}
    equal = sum(
        f"{companion[name, bits]:.3f}" == f"{value:.3f}"
        for name, values in PAPER.items()
        for bits, value in zip(BITS, values, strict=True)
    )
    moved = sum(abs(r["bcd_quantized"] - r["original"]) >= 1e-9 for r in rows)
    lines = [
        f"Of the paper's rows {equal} of 24 come out to three decimals.",
        f"Rounding B, C and D moves the largest pole in {moved} of {len(rows)} rows.",
    ]
    text = "Largest pole magnitude: as designed, with A rounded, with B, C and D rounded. Above 1 it is unstable."
    header = ("filter", "form", "bits", "designed", "A rounded", "B, C, D rounded", "stable")
    series = {n: (BITS, [companion[n, b] for b in BITS]) for n in DESIGNS}

    def pictures() -> list[Picture]:
        axes = ("bits [number]", "largest pole [magnitude]")
        return [curves([("companion form", series)], "iir", TITLE, text, axes)]

    return Shown([ShownTable(TITLE, text, header, cells)], (), pictures, lines)


TABLES.register("iir")(
    PaperTable(
        ("Table 20",),
        TITLE,
        "All four filters are unstable at 10 bits and less with A rounded, three are stable from 12, the Chebyshev "
        "filter of order 6 at no width; B, C and D never matter.",
        None,
        show,
    )
)
