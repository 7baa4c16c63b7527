"""Li, Eq. 2: the Jacobian of a step as the product of its core blocks' Jacobians and the adapter's weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loopq.evaluation.stats import mean_interval
from loopq.paper.bench import Bench
from loopq.paper.compared import N_RESAMPLES, span
from loopq.paper.diagnosis.stepmap import StepMap, factors, final_state, promoted
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object
from loopq.systems.stepwise import single_steps

TITLE = "Factors of a step's Jacobian"
#: Relative difference below which product and Jacobian are one map in float32.
EQUAL = 1e-3


def measure(bench: Bench) -> Object:
    """Factors of the last step at each prompt's final state."""
    context, rows = bench.context(), []
    last = max(single_steps(bench.system).n_updates(bench.depth) - 1, 0)
    with promoted(bench.system.model):
        for batch in context.prompts.batches(1, bench.execution.seed):
            embedding, state = final_state(bench.system, batch, bench.depth)
            rows.append(factors(StepMap(bench.system, embedding, last, bench.depth), state))
    return bench.head() | {"rows": rows}


def show(results: Sequence[Found]) -> Shown:
    """One row per factor."""
    rows, claims = [], []
    for result in results:
        name, prompts = result["model"], result["rows"]
        gap = mean_interval([p["gap"] for p in prompts], n_resamples=N_RESAMPLES)
        text = "the product of the factors is the Jacobian of a step"
        numbers = f"relative difference {gap.estimate:.1e}"
        claims.append(Claim(name, text, numbers, gap, EQUAL, below=True, given="an identity"))
        adapter, *blocks = prompts[0]["gain"]
        nearer = [min(p["identity"][b] for b in blocks) - p["identity"][adapter] for p in prompts]
        more = mean_interval(nearer, n_resamples=N_RESAMPLES)
        text = "every core block is nearer to the identity than the adapter"
        claims.append(Claim(name, text, f"cosine higher by {span(more, 3)}", more, differs="factor"))
        for factor in (adapter, *blocks):
            cells = (f"{np.mean([p[k][factor] for p in prompts]):.3f}" for k in ("gain", "identity"))
            rows.append((name, factor, *cells))
    text = (
        "At the final state of each prompt. Gain: Frobenius norm over that of the identity I; cosine with I: 1 for an "
        "identity path alone, 0 for a map without one. Jacobian and product are compared on eight Gaussian directions."
    )
    return Shown([ShownTable(TITLE, text, ("model", "factor", "gain", "cosine with I"), tuple(rows))], claims)


TABLES.register("factors")(
    PaperTable(
        ("Equation 2",),
        TITLE,
        "Core blocks contain the identity, I + dF_i/dx. The adapter W_s has no identity path around it.",
        measure,
        show,
    )
)
