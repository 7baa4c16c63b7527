"""Li, Table 12: contribution of each part of the recipe."""

from __future__ import annotations

from loopq.paper.bench import ROTATION, Bench
from loopq.paper.compared import ALL, RTN, answers, below, cured, show_variants
from loopq.paper.shown import TABLES, Claim, Found, PaperTable
from loopq.quantizers.config import Override
from loopq.storage.schema import Object

KEPT = "adapter dense, the rest RTN"
MIXED = "adapter all steps and rotated, core one step"
TURNED_ONE = "GPTQ, one step, adapter rotated"
TURNED = "GPTQ, all steps, adapter rotated"
ROTATED = "rotation of the adapter"
TITLE = "Components left out one by one"


def measure(bench: Bench) -> Object:
    """Quantize with the adapter kept, calibrated or rotated separately from the core."""
    names = bench.adapters
    dense = tuple(Override(n, {"method": "dense"}) for n in names)
    turned = tuple(Override(n, {"rotation": ROTATION}) for n in names)
    whole = tuple(Override(n, {"rotation": ROTATION, "steps": "all"}) for n in names)
    return bench.measure(
        {
            RTN: bench.rtn(),
            TURNED_ONE: bench.gptq("first", *turned),
            KEPT: bench.rtn(*dense),
            MIXED: bench.gptq("first", *whole),
            ALL: bench.gptq("all"),
            TURNED: bench.gptq("all", *turned),
        }
        | bench.cures()
    )


def refuses(bench: Bench) -> str | None:
    """The table needs an adapter to treat separately."""
    return None if bench.adapters else "the model has no adapter that joins state and embedding"


def claims(result: Found) -> list[Claim]:
    """The paper's ordering."""
    return [
        below(
            result,
            KEPT,
            RTN,
            "the adapter alone in full precision recovers part of what rounding loses",
            "precision of the adapter",
        ),
        below(result, ALL, RTN),
        below(result, TURNED, MIXED, "the core needs trajectory calibration too", "calibration of the core"),
        below(result, TURNED, ALL, "rotating the adapter helps", ROTATED),
        *answers(result, TURNED, TURNED_ONE),
        *cured(result, ALL, "GPTQ, "),
    ]


TABLES.register("components")(
    PaperTable(
        ("Table 12",),
        TITLE,
        "Huginn, GSM8K strict of 100: full precision 34, rounding 25, one step with rotation 25, adapter "
        "kept 32, adapter all steps and core one step 23, all steps 30, with rotation 34.",
        measure,
        show_variants("components", TITLE, "Distance to full precision by what is treated how.", claims),
        refuses,
    )
)
