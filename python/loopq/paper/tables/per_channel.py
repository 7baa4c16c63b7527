"""Li, Table 5: one scale per row, with and without a rotated adapter input."""

from __future__ import annotations

from loopq.paper.bench import ROTATION, Bench
from loopq.paper.compared import answers, below, cured, show_variants
from loopq.paper.shown import TABLES, Claim, Found, PaperTable
from loopq.paper.tables.components import ROTATED, refuses
from loopq.quantizers.config import Override
from loopq.storage.schema import Object

PLAIN, TURNED, CALIBRATED = "RTN", "RTN, adapter rotated", "GPTQ, all steps, adapter rotated"
TITLE = "Per-channel rounding with and without rotation"


def measure(bench: Bench) -> Object:
    """Quantize with one scale per row."""
    row = {"group_size": -1}
    turned = tuple(Override(n, {"rotation": ROTATION}) for n in bench.adapters)
    variants = {
        PLAIN: bench.rtn(**row),
        TURNED: bench.rtn(*turned, **row),
        CALIBRATED: bench.gptq("all", *turned, **row),
    }
    return bench.measure(variants | bench.cures(**row))


def claims(result: Found) -> list[Claim]:
    """Rotation helps, and calibration helps more."""
    return [
        below(result, TURNED, PLAIN, None, ROTATED),
        below(result, CALIBRATED, TURNED),
        *answers(result, TURNED, PLAIN, ROTATED),
        *answers(result, CALIBRATED, TURNED),
        *cured(result, PLAIN, "RTN, "),
    ]


TABLES.register("per-channel")(
    PaperTable(
        ("Table 5",),
        TITLE,
        "Huginn, agreement after 32 steps: rounding 8.5 %, rotated 82.6 %, rotated and calibrated over the trajectory "
        "92.7 %; GSM8K strict 0, 13 and 24 % (full precision 34 %).",
        measure,
        show_variants("per-channel", TITLE, "One scale per row: distance to full precision.", claims),
        refuses,
    )
)
