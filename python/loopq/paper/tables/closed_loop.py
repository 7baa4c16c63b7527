"""Li, Sec. 5 and App. J: Hessians collected again on the quantized rollout, and the proxy along the rollout."""

from __future__ import annotations

from typing import Any

import numpy as np

from loopq.evaluation.stats import bootstrap
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, N_RESAMPLES, RTN, below, ratio, show_variants, span
from loopq.paper.shown import TABLES, Claim, Found, PaperTable
from loopq.storage.schema import Object

CLOSED = "GPTQ, all steps, closed loop"
TITLE = "Hessians of the quantized rollout"
#: Two variants are alike where the whole interval of their ratio of KL lies within this factor of 1.
MARGIN = 1.1


def measure(bench: Bench) -> Object:
    """Quantize to INT3 from the full-precision rollout, and again from the quantized one."""
    return bench.measure(
        {
            RTN: bench.rtn(bits=3),
            ALL: bench.gptq("all", bits=3),
            CLOSED: bench.gptq("all", bits=3, inputs="closed-loop"),
        }
    )


def claims(result: Found) -> list[Claim]:
    """Both are alike in the paper. An interval that contains 1 would only show that no difference was found."""
    kl = [result["variants"][name]["kl"] for name in (CLOSED, ALL)]
    factor = bootstrap(kl, _factor, n_resamples=N_RESAMPLES)
    same = {n: 100 * float(np.mean(result["variants"][n]["agreement"])) for n in (ALL, CLOSED)}
    numbers = f"KL ratio {span(ratio(*kl), 3)}, agreement {same[ALL]:.1f} and {same[CLOSED]:.1f} %"
    text = f"closed loop and open loop are alike, their KL within a factor of {MARGIN}"
    alike = Claim(
        result["model"], text, numbers, factor, MARGIN, below=True, differs="rollout of the calibration"
    )
    return [alike, below(result, ALL, RTN)]


def _factor(x: Any, y: Any, axis: int) -> Any:
    """Ratio of the larger mean to the smaller one."""
    both = x.mean(axis) / y.mean(axis)
    return np.maximum(both, 1 / both)


TABLES.register("closed-loop")(
    PaperTable(
        ("Appendix J",),
        TITLE,
        "Huginn, INT3: agreement 84.59 % from the full-precision rollout, 84.95 % from the quantized one, difference "
        "[-2.31, 3.10] points.",
        measure,
        show_variants("closed-loop", TITLE, "Distance to full precision at INT3.", claims),
    )
)
