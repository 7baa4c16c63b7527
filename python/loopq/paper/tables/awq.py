"""Li, Table 13: effect of the calibration step on GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopq.evaluation.stats import bootstrap
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, N_RESAMPLES, ONE, RTN, below, show_variants, span, unresolved
from loopq.paper.shown import TABLES, Claim, Found, PaperTable
from loopq.storage.schema import Object

LAST = "GPTQ, last step"
ASYMMETRIC = "RTN, asymmetric grid"
AWQ = ("AWQ, step 0", "AWQ, last step", "AWQ, all steps")
TITLE = "Calibration step of GPTQ and AWQ"


def measure(bench: Bench) -> Object:
    """Calibrate either method on the first step, the last step and all steps."""
    last = str(bench.depth - 1)
    awq = dict(zip(AWQ, (bench.awq(steps) for steps in ("first", last, "all")), strict=True))
    gptq = {ONE: bench.gptq("first"), LAST: bench.gptq(last), ALL: bench.gptq("all")}
    return bench.measure({RTN: bench.rtn(), ASYMMETRIC: bench.rtn(symmetric=False)} | gptq | awq)


def _spread(kl: Sequence[Any], axis: int) -> Any:
    """Ratio of the largest to the smallest mean KL of one method's variants."""
    means = [values.mean(axis) for values in kl]
    return np.max(means, axis=0) / np.min(means, axis=0)


def _widest(*kl: Any, axis: int) -> Any:
    """The larger of the two methods' differences between largest and smallest mean KL."""
    means = [values.mean(axis) for values in kl]
    return np.maximum(np.ptp(means[:3], axis=0), np.ptp(means[3:], axis=0))


def _steps_matter_less(result: Found) -> Claim:
    """AWQ uses magnitudes, which hardly change between steps. GPTQ uses directions, which do change."""
    kl = [np.array(result["variants"][name]["kl"]) for name in (*AWQ, ONE, LAST, ALL)]
    interval = bootstrap(
        kl,
        lambda *all_kl, axis: _spread(all_kl[:3], axis) / _spread(all_kl[3:], axis),
        n_resamples=N_RESAMPLES,
    )
    numbers = (
        f"largest over smallest KL {_spread(kl[:3], 0):.3f} for AWQ, {_spread(kl[3:], 0):.3f} for GPTQ, ratio "
        + span(interval, 3)
    )
    text = "the step of calibration matters less to AWQ than to GPTQ"
    why = unresolved(bootstrap(kl, _widest, n_resamples=N_RESAMPLES))
    return Claim(
        result["model"], text, numbers, interval, 1.0, below=True, why_open=why, differs="the method"
    )


def claims(result: Found) -> list[Claim]:
    """Effect of the steps on either method, and the paper's order of the variants."""
    return [
        _steps_matter_less(result),
        below(result, ALL, ONE),
        below(result, LAST, ONE),
        below(result, AWQ[2], ASYMMETRIC),
    ]


TABLES.register("awq")(
    PaperTable(
        ("Table 13",),
        TITLE,
        "Huginn, WikiText-2 perplexity: rounding 14.98; GPTQ on step 0 15.36, step 31 15.07, all 14.89; AWQ 14.66, "
        "14.65, 14.65.",
        measure,
        show_variants("awq", TITLE, "Distance to full precision by the steps of calibration.", claims),
    )
)
