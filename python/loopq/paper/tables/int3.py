"""Li, Table 10: lower bit width, where the choice of calibration rows matters most."""

from __future__ import annotations

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE, RTN, answers, below, show_variants, three
from loopq.paper.shown import TABLES, Claim, Found, PaperTable
from loopq.storage.schema import Object

EQUAL = "GPTQ, all steps, rows of one"
TITLE = "INT3: rounding, one step, equal rows, full trajectory"


def measure(bench: Bench) -> Object:
    """Quantize into four variants at INT3. The equal-rows variant spreads the rows of one step over the trajectory."""
    return bench.measure(three(bench, bits=3) | {EQUAL: bench.gptq("all", bits=3, inputs="equal-rows")})


def claims(result: Found) -> list[Claim]:
    """The paper's order: the trajectory beats one step and equal rows. Equal rows beat one step."""
    return [
        below(result, ALL, ONE),
        below(result, ALL, RTN),
        below(result, EQUAL, ONE),
        below(result, ALL, EQUAL),
        *answers(result, ALL, ONE),
        *answers(result, ALL, EQUAL),
    ]


TABLES.register("int3")(
    PaperTable(
        ("Table 10",),
        TITLE,
        "Huginn, GSM8K strict: full precision 34.87 %, rounding 8.11, one step 5.84, equal rows 17.44, full trajectory "
        "20.70; full over one step p = 9.3e-39, over equal rows p = 0.0097.",
        measure,
        show_variants("int3", TITLE, "Distance to full precision at INT3; bars are 95 % intervals.", claims),
    )
)
