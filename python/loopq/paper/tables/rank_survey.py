"""Li, Fig. 2 and Table 18: rank gain of every model, and the gap that trajectory calibration closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopq.analysis.diagnosis.rank import FOCAL, layer_ranks
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.select import Selection
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE, RTN, below, closed, grown, three
from loopq.paper.scatter import gain_scatter
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Rank survey and recovery"
HEADER = ("model", "bottleneck", "rank at step 0", "largest gain", "of", "one step against RTN", "gap closed")


def measure(bench: Bench) -> Object:
    """Count ranks, and quantize into the three variants of the main table."""
    survey = rank_survey(bench.sums, bench.collected.job.selection, bench.execution.threads)
    return bench.measure(three(bench)) | {"ranks": survey}


def layer_class(name: str) -> str:
    """Name of a weight without its block: "transformer.core_block.0.attn.Wqkv.weight" to "attn.Wqkv".

    Examples
    --------
    >>> layer_class("transformer.core_block.0.attn.Wqkv.weight"), layer_class("transformer.adapter.weight")
    ('attn.Wqkv', 'adapter')
    """
    parts = name.removesuffix(".weight").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else parts[-1]


def _readers_class(names: Sequence[str]) -> str:
    """Name of an input by the classes of the layers that read it: "self_attn.q_proj+k_proj+v_proj"."""
    first, *others = [layer_class(name) for name in names]
    return "+".join([first, *(other.rpartition(".")[2] for other in others)])


def rank_survey(sums: HessianSet, selection: Selection, threads: int = 0) -> Object:
    """Rank of every input Hessian at step 0, at the last step and over the trajectory (Li, Table 18).

    Returns
    -------
    dict
        `threshold` is tau: the ranks count eigenvalues above tau times the largest. `layers` describes each distinct
        input by the class of its layers, width, rows and steps. It also has the three ranks and the gain (trajectory
        over step 0). `bottleneck` is the layer with the lowest step-0 rank over width.
    """
    layers = []
    for p in selection.distinct_inputs:
        h: Any = sums.accumulators[p.name]
        ranks = layer_ranks(h, steps=[], threads=threads)
        layers.append(
            {
                "layer": p.name,
                "class": _readers_class(
                    [n for n, group in selection.input_groups.items() if group == p.name]
                ),
                "n_inputs": p.in_features,
                "n_rows": int(h.n_rows(0)),
                "n_steps": p.invocations,
                "first": ranks["first"]["rank"],
                "last": ranks["last"]["rank"],
                "all": ranks["all"]["rank"],
                "gain": ranks["rank_gain"],
                "step0_trace_share": ranks["step0_trace_share"],
            }
        )
    lowest = min(layers, key=lambda row: float(row["first"]) / float(row["n_inputs"]))
    return {"threshold": FOCAL, "layers": layers, "bottleneck": lowest["layer"]}


def _row(result: Found) -> Object:
    layers = {layer["layer"]: layer for layer in result["ranks"]["layers"]}
    low = layers[result["ranks"]["bottleneck"]]
    top = max(layers.values(), key=lambda layer: layer["gain"] or 0.0)
    one_step = below(result, ONE, RTN)
    return {
        "name": result["model"],
        "bottleneck": low["class"],
        "step0": low["first"] / low["n_inputs"],
        "gain": top["gain"] or 1.0,
        "gain_of": top["class"],
        "one_step": {True: "better", False: "worse", None: "level"}[one_step.holds],
        "one_step_better": closed(result, ONE) > 0,
        "gap_closed": closed(result, ALL),
    }


def show(results: Sequence[Found]) -> Shown:
    """One row and one point per model."""
    points = [_row(result) for result in results]
    rows = tuple(
        (
            p["name"], p["bottleneck"], f"{100 * p['step0']:.2f} %", f"{p['gain']:.2f}x", p["gain_of"], p["one_step"],
            f"{100 * p['gap_closed']:.0f} %",
        )
        for p in points
    )  # fmt: skip
    claims = []
    for result in results:
        gains = [layer["gain"] for layer in result["ranks"]["layers"] if layer["gain"] is not None]
        text = "the inputs' ranks at least double over the trajectory"
        claims.append(grown(result["model"], text, gains, [1.0] * len(gains), "steps", 2.0))
        claims.append(below(result, ALL, RTN, "trajectory calibration closes part of the gap"))
    text = (
        "Bottleneck: the layers' input with the lowest rank at step 0 over its width; gain: rank of the sum of all "
        "steps over that of step 0; gap closed: share of the KL of rounding that trajectory calibration removes."
    )
    return Shown([ShownTable(TITLE, text, HEADER, rows)], claims, lambda: [gain_scatter(points)])


TABLES.register("rank-survey")(
    PaperTable(
        ("Figure 2", "Table 18"),
        TITLE,
        "Ten architectures: step-0 rank of the bottleneck 0.02 to 2.76 % of its width, largest gain 1.1x (COCONUT) to "
        "32.8x (LoopFormer), one step worse than rounding on five of nine, gap closed 17 to 102 %.",
        measure,
        show,
    )
)
