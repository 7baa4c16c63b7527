"""Li, Fig. 1b: agreement and KL of rollouts of growing depth, with the whole loop rounded per channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.rollouts import run_variants
from loopq.analysis.diagnosis.weights import quantizable, rounded
from loopq.paper.bench import Bench
from loopq.paper.compared import closer, curves, higher, without_logits
from loopq.paper.shown import MIN_ANSWERS, TABLES, Found, PaperTable, Shown, ShownTable
from loopq.quantizers.config import LayerConfig
from loopq.storage.schema import Object
from loopq.terminal.table import short

TITLE = "Agreement and KL by the number of recurrences"


def measure(bench: Bench) -> Object:
    """Run rollouts of every depth, with all weights of the loop rounded with one scale per row."""
    context = bench.context()
    rows = depth_curve(context, range(1, bench.depth + 1), context.config.layer(-1))
    return bench.head() | {"rows": rows}


def depth_curve(context: Context, depths: Sequence[int], config: LayerConfig) -> list[Object]:
    """Round the whole loop and compare rollouts of several depths, each with the unchanged model.

    Returns
    -------
    list of dict
        `depth`, then the values after its last step: `agreement`, `kl` (with logits) and `output_error`. `last` holds
        the same by prompt.
    """
    rows = []
    for depth in depths:
        deep = replace(context, n_steps=depth)
        changed = rounded(context.system, quantizable(deep.parameters), config, context.rounder)
        runs = run_variants(deep, {"changed": changed}, read=(depth,), label=f"depth {depth}")
        last = runs["changed"].to_json()["last"]
        rows.append(
            {"depth": depth, "last": last} | {k: float(np.mean(values)) for k, values in last.items()}
        )
    return rows


def show(results: Sequence[Found]) -> Shown:
    """One row per depth."""
    rows, claims = [], []
    for result in results:
        depths = result["rows"]
        rows += [
            (result["model"], str(r["depth"]), f"{100 * r['agreement']:.1f} %", short(r["kl"]))
            for r in depths
        ]
        first, last = depths[0], depths[-1]
        deep, flat = (r["last"]["agreement"] for r in (last, first))
        # A task that is read at one token has one prediction of each prompt, as a score.
        if len(deep) >= MIN_ANSWERS or any(0 < a < 1 for a in (*deep, *flat)):
            text = (
                f"at depth {last['depth']} rounding changes fewer predictions than at depth {first['depth']}"
            )
            claims.append(higher(result["model"], text, deep, flat, "depth"))
        text = f"at depth {last['depth']} its KL is smaller than at depth {first['depth']}"
        claims.append(closer(result["model"], text, last["last"]["kl"], first["last"]["kl"], "depth"))
    text = "All weights of the loop rounded with one scale per row; full precision runs at the same depth."
    header = ("model", "recurrences", "agreement", "KL")

    def pictures() -> list[Any]:
        at = "recurrences [number]"
        both = []
        for key, unit, scale in (("agreement", "same top-1 prediction [%]", 100), ("kl", "KL [nats]", 1)):
            panels = [
                (f["model"], {key: ([r["depth"] for r in f["rows"]], [scale * r[key] for r in f["rows"]])})
                for f in results
            ]
            both.append(curves(panels, f"depth-{key}", f"{key} by depth", text, (at, unit)))
        return both

    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims, pictures)


TABLES.register("depth-curve")(
    PaperTable(
        ("Figure 1b",),
        TITLE,
        "COCONUT, 15 prompts: agreement rises from 44.8 % to 61.5 % over 8 latent recurrences, KL falls from 1.25 to "
        "0.93: a loop with identity paths forgives the error.",
        measure,
        show,
        without_logits,
    )
)
