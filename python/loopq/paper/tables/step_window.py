"""Li, Table 23 and App. P: calibration without step 0, and with less weight on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loopq import _native as native
from loopq.analysis.diagnosis.weights import Matrix, weight_of
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, RTN, below, most, show_variants
from loopq.paper.shown import TABLES, Claim, Found, PaperTable
from loopq.run.config import QuantConfig
from loopq.run.source import Layers
from loopq.storage.schema import Object

SKIP = "GPTQ, without step 0"
# The paper's five values. 1 / N would be the plain sum.
ALPHAS = ("0.05", "0.10", "0.15", "0.20", "0.25")
TITLE = "Calibration without step 0"


def measure(bench: Bench) -> Object:
    """Leave step 0 out, or weigh it by alpha against the mean of the others. Compare the late step's proxy too."""
    whole, skip = bench.solve(bench.gptq("all")), bench.solve(bench.gptq("1:"))
    layers: dict[str, QuantConfig | Layers] = {RTN: bench.rtn(), ALL: whole, SKIP: skip}
    layers |= {f"GPTQ, alpha = {a}": bench.gptq("all", step_weights=f"alpha={a}") for a in ALPHAS}
    wins, of = _late(bench, skip, whole)
    return bench.measure(layers) | {"late_wins": wins, "late_of": of}


def _late(bench: Bench, skip: Layers, whole: Layers) -> tuple[int, int]:
    """Count layers with a smaller loss at the last step when step 0 is left out."""
    input_groups = bench.collected.job.selection.input_groups
    shared = {p.name: p for p in bench.collected.job.selection.observed if p.invocations == bench.depth}
    last = bench.depth - 1

    def errors(layers: Layers) -> dict[str, Matrix]:
        return {
            n: np.ascontiguousarray(layers[n].dequantize() - weight_of(bench.system, p), dtype=np.float32)
            for n, p in shared.items()
            if n in layers
        }

    late = {n: bench.sums.accumulators[input_groups[n]].matrix([last]) for n in shared}
    return late_step_wins(errors(skip), errors(whole), late)


def late_step_wins(
    candidate: Mapping[str, Any], baseline: Mapping[str, Any], late: Mapping[str, Any]
) -> tuple[int, int]:
    """Count the layers whose proxy under the late step's H is smaller with the candidate's errors, and all (App. P)."""

    def proxy(errors: Mapping[str, Any], name: str) -> float:
        return float(native.proxy(errors[name], None, late[name]))

    return sum(proxy(candidate, n) < proxy(baseline, n) for n in candidate), len(candidate)


def claims(result: Found) -> list[Claim]:
    """The effect of leaving step 0 out depends on the model. The late step's proxy improves nearly everywhere."""
    wins, of = result["late_wins"], result["late_of"]
    text = "without step 0 the loss at the last step is smaller in most layers"
    return [
        most(
            result["model"],
            text,
            [i < wins for i in range(of)],
            "step 0",
            given="its sum weighs that step more",
        ),
        below(result, SKIP, ALL, "leaving step 0 out helps (in the paper on 2 of 6 models)"),
        below(result, ALL, RTN),
    ]


TABLES.register("step-window")(
    PaperTable(
        ("Table 23",),
        TITLE,
        "Perplexity without step 0 minus that of all steps: Ouro 2.6B -0.52, Parcae 1.3B -0.26, Huginn +0.03, R-Llama "
        "+0.19, LoopFormer +0.25, Ouro 1.4B +0.81; the late step's proxy improves in 335 of 336 and 168 of 168 layers.",
        measure,
        show_variants("step-window", TITLE, "Distance to full precision by the weight of step 0.", claims),
    )
)
