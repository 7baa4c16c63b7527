"""Li, Table 11: bits per byte of four variants, from full precision to trajectory calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loopq.evaluation.stats import mean_interval
from loopq.paper.bench import Bench
from loopq.paper.compared import (
    ALL,
    CALIBRATION,
    FULL,
    N_RESAMPLES,
    ONE,
    RTN,
    bars,
    bits_per_byte,
    three,
    unresolved,
    without_logits,
)
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Bits per byte of text"
#: Differences that make no difference.
SAME_BITS = (-0.005, 0.005)


def measure(bench: Bench) -> Object:
    """Quantize into the three variants of the main table."""
    return bench.measure(three(bench)) | {"text": bench.model.evaluation.digest()}


def _claim(result: Found, better: str, worse: str, control: Found | None = None) -> Claim:
    a, b = (np.array(bits_per_byte(*of)) for of in ((result, better), (control or result, worse)))
    gain = mean_interval(b - a, n_resamples=N_RESAMPLES)
    numbers = f"{gain.estimate:+.4f} bits per byte saved [{gain.low:+.4f}, {gain.high:+.4f}]"
    text = f"{better} needs fewer bits than {worse}"
    text += f" of {control['model']}, in as many bytes" if control else ""
    why, differs = unresolved(gain), "loop" if control else CALIBRATION
    pair = () if control else (better, worse)
    return Claim(
        result["model"], text, numbers, gain, why_open=why, differs=differs, alike=SAME_BITS, pair=pair
    )


def _alike(a: Found, b: Found) -> bool:
    """Whether two models were measured on the same bytes of text, and their layers' sizes are within 5 %."""
    sizes = [f["variants"][ALL]["n_bytes"] for f in (a, b)]
    same: bool = a["bytes_per_token"] == b["bytes_per_token"] and a.get("text", "") == b.get("text")
    return same and max(sizes) <= 1.05 * min(sizes)


def show(results: Sequence[Found]) -> Shown:
    """One row per model, and paired intervals of the differences."""
    names = (FULL, RTN, ONE, ALL)
    known = [f for f in results if bits_per_byte(f, FULL) is not None]
    rows = tuple(
        (
            f["model"],
            *(f"{float(np.mean(bits_per_byte(f, n) or [])):.4f}" for n in names),
            f"{f['variants'][RTN]['n_bytes'] / 1e3:.1f}",
        )
        for f in known
    )
    # A model of one step is no evidence about loops. It is the control of loops with as many bytes.
    loops, controls = ([f for f in known if (f["n_steps"] > 1) == looped] for looped in (True, False))
    claims = [_claim(f, ALL, other) for f in loops for other in (RTN, ONE)]
    claims += [_claim(f, ALL, ALL, c) for f in loops for c in controls if _alike(f, c)]
    text = "Mean over held-out prompts; lower is better. kB: of the quantized layers."
    table = ShownTable(TITLE, text, ("model", *names, "kB"), rows)
    caption = "Distance to full precision in KL; the table has the same in bits per byte."
    return Shown([table], claims, lambda: [bars(results, "bits-per-byte", TITLE, caption)])


TABLES.register("bits-per-byte")(
    PaperTable(
        ("Table 11",),
        TITLE,
        "Seven checkpoints on WikiText-2: trajectory calibration is best on all; one step is worse than rounding on "
        "four (Ouro 1.4B 0.7238 against 0.7193, full precision 0.6591, trajectory 0.6912).",
        measure,
        show,
        without_logits,
        one_step=True,
    )
)
