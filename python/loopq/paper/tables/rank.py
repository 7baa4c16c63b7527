"""Li, Tables 1 and 19: rank of each input at the first two steps and over the trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopq.analysis.diagnosis.rank import FOCAL, layer_ranks
from loopq.analysis.report.style import short_names
from loopq.paper.bench import Bench
from loopq.paper.compared import curves, grown
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Rank of each layer's input, step by step"
HEADER = ("model", "input of", "width", "step 0", "of width", "step 1", "last step", "all steps", "gain")


def measure(bench: Bench) -> Object:
    """Count eigenvalues above 1e-3 of the largest at every step over the same positions, and of the sum."""
    layers = {}
    for p in bench.collected.job.selection.distinct_inputs:
        h: Any = bench.sums.accumulators[p.name]
        ranks = layer_ranks(h, threads=bench.execution.threads)
        layers[p.name] = {
            "dim": ranks["dim"],
            "per_step": [s["rank"] for s in ranks["per_step"]],
            "all": ranks["all"]["rank"],
            "gain": ranks["rank_gain"],
        }
    return bench.head() | {"layers": layers, "adapters": list(bench.adapters)}


def show(results: Sequence[Found]) -> Shown:
    """One row per input. The curves show the inputs with the largest and the smallest gain."""
    rows, claims, panels = [], [], []
    for result in results:
        layers = result["layers"]
        short = short_names(layers)
        for name, layer in layers.items():
            steps = layer["per_step"]
            rows.append(
                (
                    result["model"], short[name], f"{layer['dim']}", f"{steps[0]}",
                    f"{100 * steps[0] / layer['dim']:.2f} %",
                    f"{steps[1]}" if len(steps) > 1 else None, f"{steps[-1]}", f"{layer['all']}",
                    None if layer["gain"] is None else f"{layer['gain']:.2f}x",
                )
            )  # fmt: skip
        order = sorted(layers, key=lambda n: -(layers[n]["gain"] or 0.0))
        chosen = dict.fromkeys([*order[:2], order[-1]])
        panels.append(
            (result["model"], {short[n]: (range(len(s)), s) for n in chosen if (s := layers[n]["per_step"])})
        )
        text = "the last step has more directions than step 0 over the same positions"
        steps = [layer["per_step"] for layer in layers.values() if len(layer["per_step"]) > 1]
        claims.append(grown(result["model"], text, [s[-1] for s in steps], [s[0] for s in steps], "step"))
    text = f"Eigenvalues of H_t above {FOCAL:g} of the largest; gain: rank of the sum over that of step 0."
    title = "Rank by step"

    def pictures() -> list[Any]:
        return [curves(panels, "rank", title, text, ("recurrence step [index]", "rank [directions]"))]

    return Shown([ShownTable(TITLE, text, HEADER, tuple(rows))], claims, pictures)


TABLES.register("rank")(
    PaperTable(
        ("Table 1", "Table 19"),
        TITLE,
        "Huginn: adapter 43 of 10,560 at step 0, 259 at step 1, 335 over 32 steps (7.8x); Wqkv about 1,050 to 1,450 of "
        "5,280; mlp.proj 65 to 89 of 17,920. Step 0 to step 1: Ouro 1 to 974 of 5,632, LoopFormer 31 to 154 of 2,048, "
        "R-Llama 1 to 2 of 4,096, Parcae 140M 27 to 21 of 3,072.",
        measure,
        show,
    )
)
