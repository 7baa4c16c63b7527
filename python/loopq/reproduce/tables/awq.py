"""Li, Table 13: how much the step of calibration matters to GPTQ and to AWQ."""

from __future__ import annotations

from typing import Any

import numpy as np

from loopq.reproduce.bench import Bench
from loopq.reproduce.compared import ALL, ONE, RTN, below, show_variants
from loopq.reproduce.shown import TABLES, Claim, Found, PaperTable

LAST = "GPTQ, last step"
ASYMMETRIC = "RTN, asymmetric grid"
AWQ = ("AWQ, step 0", "AWQ, last step", "AWQ, all steps")
TITLE = "Calibration step of GPTQ and AWQ"


def measure(bench: Bench) -> dict[str, Any]:
    """Calibrate either method on the first step, the last and all."""
    last = str(bench.depth - 1)
    awq = dict(zip(AWQ, (bench.awq(steps) for steps in ("first", last, "all")), strict=True))
    gptq = {ONE: bench.gptq("first"), LAST: bench.gptq(last), ALL: bench.gptq("all")}
    return bench.measure({RTN: bench.rtn(), ASYMMETRIC: bench.rtn(symmetric=False)} | gptq | awq)


def _spread(found: Found, names: tuple[str, ...]) -> float:
    means = [float(np.mean(found["variants"][n]["kl"])) for n in names]
    return max(means) / min(means)


def claims(found: Found) -> list[Claim | None]:
    """AWQ reads magnitudes, which hardly change from step to step; GPTQ reads directions, which do."""
    gptq, awq = _spread(found, (ONE, LAST, ALL)), _spread(found, AWQ)
    numbers = f"largest over smallest KL {awq:.3f} for AWQ, {gptq:.3f} for GPTQ"
    text = "the step of calibration matters less to AWQ than to GPTQ"
    return [
        Claim(found["model"], text, awq < gptq, numbers),
        below(found, ALL, ONE),
        below(found, LAST, ONE),
        below(found, AWQ[2], ASYMMETRIC),
    ]


def refuses(bench: Bench) -> str | None:
    """One step has no other to compare with."""
    return None if bench.depth > 1 else "the model has one step"


TABLES.register("awq")(
    PaperTable(
        ("Table 13",),
        TITLE,
        "Huginn, WikiText-2 perplexity: rounding 14.98; GPTQ on step 0 15.36, step 31 15.07, all 14.89; AWQ 14.66, "
        "14.65, 14.65.",
        measure,
        show_variants("awq", TITLE, "Distance to full precision by the steps of calibration.", claims),
        refuses,
    )
)
