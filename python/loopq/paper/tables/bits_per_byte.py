"""Li, Table 11: bits per byte of four variants, from full precision to trajectory calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopq.evaluate.stats import mean_interval
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, FULL, N_RESAMPLES, ONE, RTN, bars, bits_per_byte, three, without_logits
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, Table

TITLE = "Bits per byte of text"


def measure(bench: Bench) -> dict[str, Any]:
    """Quantize into the three variants of the main table."""
    return bench.measure(three(bench))


def _claim(found: Found, better: str, worse: str) -> Claim:
    a, b = (np.array(bits_per_byte(found, name)) for name in (better, worse))
    gain = mean_interval(b - a, n_resamples=N_RESAMPLES)
    numbers = f"{gain.estimate:+.4f} bits per byte saved [{gain.low:+.4f}, {gain.high:+.4f}]"
    return Claim(found["model"], f"{better} needs fewer bits than {worse}", numbers, gain)


def show(founds: Sequence[Found]) -> Shown:
    """One row per model, and paired intervals of the differences."""
    names = (FULL, RTN, ONE, ALL)
    known = [f for f in founds if bits_per_byte(f, FULL) is not None]
    rows = tuple(
        (
            f["model"],
            *(f"{float(np.mean(bits_per_byte(f, n) or [])):.4f}" for n in names),
            f"{f['variants'][RTN]['n_bytes'] / 1e3:.1f}",
        )
        for f in known
    )
    # A one-step model is no evidence about loops. It is shown next to loops with as many bytes.
    made = [_claim(f, ALL, other) for f in known if f["n_steps"] > 1 for other in (RTN, ONE)]
    text = "Mean over held-out prompts; lower is better. kB: of the quantized layers."
    table = Table(TITLE, text, ("model", *names, "kB"), rows)
    caption = "Distance to full precision in KL; the table has the same in bits per byte."
    return Shown([table], made, lambda: [bars(founds, "bits-per-byte", TITLE, caption)])


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
