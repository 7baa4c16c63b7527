"""Li, Fig. 5 and Table 22: eigenvalues of a broad and a narrow input, by prompts and by steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.rank import THRESHOLDS, curve, describe_spectrum, spectrum, thresholded_rank
from loopq.analysis.report.style import short_name
from loopq.calibrate.data import TokenSet
from loopq.paper.bench import Bench
from loopq.paper.compared import curves, grown
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.run.config import QuantConfig
from loopq.run.model_source import ModelSource
from loopq.storage.schema import Object

TITLE = "Eigenvalues by threshold, prompts and steps"
# The paper compares 50 prompts with 1,000. This table compares a quarter of the prompts with all.
SHARE = 4
FEW, MANY, STEPS = "a quarter, step 0", "all prompts, step 0", "a quarter, all steps"


def measure(bench: Bench) -> Object:
    """Take the adapter, or else the input with the fewest directions, and the first attention input."""
    tokens = bench.model.calibration
    few = _sums(bench, tokens.take(0, max(1, len(tokens.sequences) // SHARE)))
    out, more = {}, []
    for p in bench.collected.job.selection.distinct_inputs:
        if p.invocations > 1:
            small, whole = (sums.accumulators[p.name] for sums in (few, bench.sums))
            pair: Any = (small.matrix(list(range(p.invocations))), whole.matrix([0]))
            more.append([thresholded_rank(spectrum(np.asarray(h, np.float64))) for h in pair])
    for name in _chosen(bench):
        small, whole = few.accumulators[name], bench.sums.accumulators[name]
        steps = list(range(len(list(small.steps))))
        kinds = {FEW: small.matrix([0]), MANY: whole.matrix([0]), STEPS: small.matrix(steps)}
        rows = {FEW: small.n_rows(0), MANY: whole.n_rows(0), STEPS: len(steps) * small.n_rows(0)}
        values = {kind: spectrum(np.asarray(h, np.float64)) for kind, h in kinds.items()}
        out[name] = {
            kind: describe_spectrum(v)
            | {"curve": curve(2 * v / rows[kind]), "largest": 2 * float(v[0]) / rows[kind]}
            for kind, v in values.items()
        }
    return bench.head() | {"layers": out, "more": more, "n_prompts": len(tokens.sequences)}


def _sums(bench: Bench, tokens: TokenSet) -> Any:
    source = ModelSource.of(bench.system, tokens, n_steps=bench.n_steps, execution=bench.execution)
    plan = source.plan(QuantConfig(rank_threshold=None))
    return source.all_steps(plan)


def _chosen(bench: Bench) -> list[str]:
    """Inputs to show: the narrowest at step 0 (the adapter if present), and one of the core."""
    groups = bench.collected.job.selection.distinct_inputs
    first = next((p.name for p in groups if p.role == "adapter"), None)
    if first is None:
        ranks = {p.name: describe_spectrum(_first(bench.sums.accumulators[p.name])) for p in groups}
        first = min(ranks, key=lambda n: float(ranks[n]["rank"]))
    other = next((p.name for p in groups if p.role == "attention" and p.name != first), None)
    return [first] if other is None else [first, other]


def _first(hessians: Any) -> NDArray[np.float64]:
    return spectrum(hessians.matrix([0]))


def show(results: Sequence[Found]) -> Shown:
    """Counts by threshold, effective and stable rank, and the spectra of the row-averaged Hessians."""
    rows, claims, panels = [], [], []
    for result in results:
        for name, kinds in result["layers"].items():
            for kind, d in kinds.items():
                counts = [f"{d['ranks'][f'{tau:g}']:,}" for tau in THRESHOLDS]
                tail = (f"{d['effective_rank']:.0f}", f"{d['stable_rank']:.1f}")
                rows.append((result["model"], short_name(name), kind, *counts, *tail))
            series = {
                k: (d["curve"]["index"], [max(v, 1e-12) for v in d["curve"]["value"]])
                for k, d in kinds.items()
            }
            panels.append((f"{result['model']}: {short_name(name)}", series))
        text = "more steps give the inputs more directions than more prompts do"
        if result["more"]:
            steps, prompts = np.array(result["more"]).T
            claims.append(grown(result["model"], text, steps, prompts, "what is added"))
    text = f"Eigenvalues of 2 X^T X / m above each share of the largest; a quarter: one prompt in {SHARE}."
    header = ("model", "input of", "condition", *(f"{tau:g}" for tau in THRESHOLDS), "effective", "stable")
    axes = ("index of the eigenvalue [number]", "eigenvalue of 2 X^T X / m [squared input]")

    def pictures() -> list[Any]:
        return [curves(panels, "spectra", "Eigenvalue spectra", text, axes, log=True)]

    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims, pictures)


TABLES.register("spectra")(
    PaperTable(
        ("Figure 5", "Table 22"),
        TITLE,
        "Huginn's adapter at 1e-3: 43 directions for 50 prompts, 20 for 1,000, 335 for 50 prompts and 32 steps "
        "(effective rank 51, 80, 137; stable rank 1.8, 1.8, 2.7); Wqkv 2,111, 3,588, 1,587.",
        measure,
        show,
    )
)
