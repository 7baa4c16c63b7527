"""Li, Fig. 3 with Tables 6 and 7: number of trajectory steps that calibration needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopq.analysis.diagnosis.rank import layer_ranks, spectrum, thresholded_rank
from loopq.paper.bench import Bench
from loopq.paper.compared import RTN, answers, below, curves, grown, table
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object
from loopq.terminal.table import short

TITLE = "Calibration horizon"


def horizons(depth: int) -> list[int]:
    """Numbers of summed steps: powers of two and the depth, as in the paper."""
    powers = [2**k for k in range(depth.bit_length()) if 2**k < depth]
    return [*powers, depth]


def _name(n_cal: int) -> str:
    return f"GPTQ, {n_cal} step{'s' if n_cal > 1 else ''}"


def measure(bench: Bench) -> Object:
    """Calibrate on the first 1, 2, 4 and more steps. Count the rank of the layer that gains most."""
    chosen = horizons(bench.depth)
    result = bench.measure({RTN: bench.rtn()} | {_name(n): bench.gptq(f"0:{n}") for n in chosen})
    gains = {
        p.name: layer_ranks(bench.sums.accumulators[p.name], steps=[])["rank_gain"] or 0.0
        for p in bench.collected.job.selection.distinct_inputs
        if p.invocations == bench.depth
    }
    layer = max(gains, key=lambda name: gains[name])
    h: Any = bench.sums.accumulators[layer]
    ranks = [thresholded_rank(spectrum(h.matrix(list(range(n))))) for n in chosen]
    last = thresholded_rank(spectrum(h.matrix([bench.depth - 1])))
    return result | {
        "gains": list(gains.values()),
        "horizons": chosen,
        "layer": layer,
        "dim": h.dim,
        "ranks": ranks,
        "rank_last_step": last,
    }


def claims(result: Found) -> list[Claim]:
    """More steps give more directions and less error, mostly within the first few."""
    first, last = _name(1), _name(result["horizons"][-1])
    text = "the ranks of the inputs grow with the horizon"
    return [
        grown(result["model"], text, result["gains"], np.ones(len(result["gains"])), "steps"),
        below(result, last, first),
        below(result, last, RTN),
        below(result, _name(result["horizons"][1]), first, "two steps already gain on one"),
        *answers(result, last, first),
    ]


def show(results: Sequence[Found]) -> Shown:
    """Table of horizons with ranks, and curves of both."""
    rows = tuple(
        (f["model"], f["layer"], str(n), str(r), f"{100 * r / f['dim']:.2f} %", short(_kl(f, n)))
        for f in results
        for n, r in zip(f["horizons"], f["ranks"], strict=True)
    )
    text = "Rank of the input that gains most, at 1e-3 of the largest eigenvalue, and KL by the steps summed."
    ranks = ShownTable(TITLE + ": rank", text, ("model", "layer", "steps", "rank", "of width", "KL"), rows)
    tested = [c for f in results for c in claims(f)]

    def pictures() -> list[Any]:
        rank = [(f["model"], {f["layer"]: (f["horizons"], f["ranks"])}) for f in results]
        kl = []
        for f in results:
            flat = [float(np.mean(f["variants"][RTN]["kl"]))] * len(f["horizons"])
            both = {"GPTQ": (f["horizons"], [_kl(f, n) for n in f["horizons"]]), RTN: (f["horizons"], flat)}
            kl.append((f["model"], both))
        at = "steps that are summed [number]"
        return [
            curves(rank, "horizon-rank", "Rank by calibration horizon", text, (at, "rank [directions]")),
            curves(
                kl, "horizon-kl", "Error by calibration horizon", text, (at, "KL to full precision [nats]")
            ),
        ]

    return Shown([ranks, table(results, TITLE)], tested, pictures)


def _kl(result: Found, n_cal: int) -> float:
    return float(np.mean(result["variants"][_name(n_cal)]["kl"]))


TABLES.register("horizon")(
    PaperTable(
        ("Figure 3", "Table 6", "Table 7"),
        TITLE,
        "Huginn's adapter: rank 43, 234, 282, 335 of 10,560 for 1, 4, 8, 32 steps, agreement 88.2, 90.9, 92.5, 92.5 % "
        "(rounding 88.0 %). Ouro 1.4B perplexity 14.67, 13.17, 13.05, 12.97 for 1 to 4 steps; Parcae 1.3B 27.35, "
        "99.59, 20.98, 20.62, 20.84 for 1, 2, 4, 6, 8: not monotone.",
        measure,
        show,
    )
)
