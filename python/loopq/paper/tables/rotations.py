"""Li, Table 14 and App. D: Hadamard and random rotations of the adapter's input."""

from __future__ import annotations

from loopq.paper.bench import Bench
from loopq.paper.compared import below, cured, show_variants
from loopq.paper.shown import TABLES, Claim, Found, PaperTable
from loopq.paper.tables.components import ROTATED, refuses
from loopq.quantizers.config import Override
from loopq.storage.schema import Object

NONE = "INT4 GPTQ, no rotation"
KINDS = {"Hadamard 512": "hadamard:512", "Hadamard 32": "hadamard:32", "random 512": "random:512"}
TITLE = "Rotations of the adapter's input, one scale per row"


def measure(bench: Bench) -> Object:
    """Calibrate INT4 over the trajectory and round INT8, per channel, under each rotation."""
    int4, int8 = ({"bits": bits, "group_size": -1} for bits in (4, 8))
    variants = {NONE: bench.gptq("all", **int4), "INT8 RTN, no rotation": bench.rtn(**int8)}
    for name, kind in KINDS.items():
        turned = tuple(Override(n, {"rotation": kind}) for n in bench.adapters)
        variants[f"INT4 GPTQ, {name}"] = bench.gptq("all", *turned, **int4)
        variants[f"INT8 RTN, {name}"] = bench.rtn(*turned, **int8)
    return bench.measure(variants | bench.cures(group_size=-1))


def claims(result: Found) -> list[Claim]:
    """A rotation helps at INT4. Hadamard and random are alike, so there is no claim to test."""
    names = [f"INT4 GPTQ, {name}" for name in KINDS]
    return [
        *(below(result, name, NONE, None, ROTATED) for name in names),
        below(result, names[0], names[2], "Hadamard is closer than random", ROTATED),
        *cured(result, NONE, "GPTQ, "),
    ]


TABLES.register("rotations")(
    PaperTable(
        ("Table 14",),
        TITLE,
        "Huginn, INT4 per channel, all steps: agreement random 91.0 %, Hadamard 90.7 %; GSM8K strict of 1,319: 26.9 "
        "and 29.4 % (full precision 34.9 %). INT8: all within 0.01 perplexity of full precision.",
        measure,
        show_variants("rotations", TITLE, "Distance to full precision by rotation.", claims),
        refuses,
    )
)
