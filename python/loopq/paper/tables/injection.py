"""Li, Fig. 1a with Tables 3 and 4: rounding in parts of the loop, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopq.analysis.diagnosis.exposure import ALL, CORE, EXPOSED, GAUSSIAN, injection_weights
from loopq.analysis.diagnosis.rollouts import run_variants
from loopq.analysis.diagnosis.weights import Weights
from loopq.evaluation.stats import mean_interval
from loopq.paper.bench import CURE_GROUP, Bench
from loopq.paper.compared import N_RESAMPLES, curves, higher, without_exposed
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Controlled injection: one scale per row in parts of the loop"
GROUPED = f"groups of {CURE_GROUP}"
WORDS = {
    "none": "none (other initial state)",
    EXPOSED: "exposed layers",
    CORE: "all other layers",
    ALL: "all layers",
    GAUSSIAN: "exposed layers, Gaussian noise of equal norm",
}
PAIRS = ((CORE, EXPOSED, "place of the error"), (GAUSSIAN, EXPOSED, "kind of the error"))


def measure(bench: Bench) -> Object:
    """Compare every step's prediction with full precision, from the same initial state and from another one."""
    context = bench.context()
    by_pairing = {}

    def weights(group_size: int) -> dict[str, Weights]:
        config = context.config.layer(group_size)
        return injection_weights(bench.system, bench.depth, config, noise_seed=bench.execution.seed)

    kinds = [("paired", -1, None), ("unpaired", -1, bench.execution.seed + 1)]
    if bench.source.planted:
        kinds.insert(1, (GROUPED, CURE_GROUP, None))
    for pairing, group_size, other in kinds:
        if other is not None and not bench.system.state_is_random:
            continue
        runs = run_variants(context, weights(group_size), variant_seed=other)
        by_pairing[pairing] = {name: run.to_json() for name, run in runs.items()}
    return bench.head() | {"runs": by_pairing}


def show(results: Sequence[Found]) -> Shown:
    """Agreement after the first and the last step, with curves of paired runs."""
    rows, claims, panels = [], [], []
    for result in results:
        for pairing, runs in result["runs"].items():
            for name, run in runs.items():
                end = mean_interval(run["last"]["agreement"], n_resamples=N_RESAMPLES)
                rows.append(
                    (
                        result["model"], pairing, WORDS[name], f"{100 * run['agreement'][0]:.1f} %",
                        f"{100 * run['agreement'][-1]:.1f} %", f"[{100 * end.low:.1f}, {100 * end.high:.1f}]",
                        f"{run['kl'][-1]:.3g}",
                    )
                )  # fmt: skip
        runs = result["runs"]["paired"]
        series = {
            WORDS[n]: (r["steps"], [100 * a for a in r["agreement"]]) for n, r in runs.items() if n != "none"
        }
        panels.append((result["model"], series))
        if GROUPED in result["runs"]:
            cured, harmed = (r[EXPOSED]["last"]["agreement"] for r in (result["runs"][GROUPED], runs))
            text = f"{GROUPED} undo the damage in {WORDS[EXPOSED]}"
            claims.append(higher(result["model"], text, cured, harmed, "group size"))
        claims += [_claim(result["model"], runs, *pair) for pair in PAIRS]
    text = (
        "Top-1 agreement with full precision, mean over prompts. Paired runs start from the state of full precision, "
        "unpaired ones from another; the paper's rows look unpaired (its full-precision control has 68.8 % after one "
        "step)."
    )
    header = ("model", "states", "rounded", "after one step", "after all steps", "95 %", "KL")
    axes = ("recurrence steps done [number]", "same top-1 prediction [%]")

    def pictures() -> list[Any]:
        return [curves(panels, "injection", "Agreement along the rollout", text, axes)]

    return Shown([ShownTable(TITLE, text, header, tuple(rows))], claims, pictures)


def _claim(model: str, runs: Any, better: str, worse: str, differs: str) -> Claim:
    text = f"damage of rounding in {WORDS[worse]} is larger than in {WORDS[better]}"
    more, less = (runs[name]["last"]["agreement"] for name in (better, worse))
    return higher(model, text, more, less, differs)


TABLES.register("injection")(
    PaperTable(
        ("Figure 1a", "Table 3", "Table 4"),
        TITLE,
        "Agreement after 32 steps. Huginn: adapter 10.5 %, core 87.9 %, both 10.6 %, noise of equal norm 25.0 %, "
        "another initial state 98.9 %. R-Llama: adapter 49.1 %, core 74.8 %, both 34.6 %.",
        measure,
        show,
        without_exposed,
    )
)
