"""Li, Table 21 and App. N: errors in a selective scan, by component and with an identity term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopq.errors import SystemContractError
from loopq.paper.bench import Bench
from loopq.paper.compared import closer, curves, higher
from loopq.paper.controls import ssm
from loopq.paper.controls.rounding import round_signed
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Errors in a selective scan"
# Li, App. N uses 5 prompts, and token positions 8 and 32 for the growth.
N_PROMPTS, EARLY_LATE = 5, (8, 32)


def measure(bench: Bench) -> Object:
    """Round one component of the middle layer at a time, and add an identity term to its recurrence."""
    model = bench.system.model
    mixers = ssm.find_mixers(model)
    layer = len(mixers) // 2
    prompts = [s.tolist() for s in bench.model.evaluation.take(0, N_PROMPTS).sequences]
    study = ssm.component_study(model, prompts, [layer], seeds=(0,), early_late=EARLY_LATE)
    weight = mixers[0].A_log.detach().double().cpu().numpy()
    norm = float(np.linalg.norm(round_signed(weight, 4, weight.shape[1]) - weight))
    scans = [ssm.capture(model, layer, ids) for ids in prompts]
    components = [
        {k: row[k] for k in ("component", "perturbation", "growth", "error_norm")}
        | {"start": float(np.median([p["relative"][0] for p in row["prompts"]]))}
        | {"late": float(np.median([p["relative"][EARLY_LATE[1]] for p in row["prompts"]]))}
        for row in study
    ]
    sweep = ssm.identity_sweep(scans, norm)
    a_log = next(row for row in study if (row["component"], row["perturbation"]) == ("A_log", "int4"))
    growth = [[p["relative"][token] for p in a_log["prompts"]] for token in EARLY_LATE]
    return bench.head() | {
        "layer": layer, "norm": norm, "components": components, "alphas": sweep, "growth": growth
    }  # fmt: skip


def refuses(bench: Bench) -> str | None:
    """The table needs a scan."""
    try:
        ssm.find_mixers(bench.system.model)
    except SystemContractError as error:
        return str(error)
    return None


def show(results: Sequence[Found]) -> Shown:
    """Growth by component. Relative error, absolute error and size of the state by the identity term."""
    parts, sweep, claims, panels, lines = [], [], [], [], []
    for result in results:
        for row in result["components"]:
            growth = None if row["growth"] is None else f"{row['growth']:.2f}x"
            cells = (f"{row['start']:.3g}", f"{row['late']:.3g}", growth)
            parts.append((result["model"], row["component"], row["perturbation"], *cells))
        base = result["alphas"][0]["relative"]
        for p in result["alphas"]:
            change = f"{100 * (p['relative'] / base - 1):+.0f} %"
            sizes = (f"{p['absolute']:.3g}", f"{p['norm']:.3g}", f"{p['largest_multiplier']:.2f}")
            sweep.append((result["model"], f"{p['alpha']:.2f}", f"{p['relative']:.3f}", change, *sizes))
        by = {r["component"]: r for r in result["components"] if r["perturbation"] == "int4"}
        lines.append(
            f"{result['model']}: error by A_log at token 0: {by['A_log']['start']:.2g}; by out_proj at token "
            f"{EARLY_LATE[1]}: {by['out_proj']['late']:.2g}."
        )
        text = f"the error by A_log grows from token {EARLY_LATE[0]} to {EARLY_LATE[1]}"
        early_late = result["growth"]
        claims.append(
            higher(result["model"], text, early_late[1], early_late[0], "token", "percent of the state")
        )
        first, last = result["alphas"][0]["by_prompt"], result["alphas"][-1]["by_prompt"]
        text = "an identity term lowers the relative error"
        claims.append(closer(result["model"], text, last, first, "identity term", "error ratio"))
        curve = [(p["alpha"], p["relative"]) for p in result["alphas"]]
        series: Any = {"relative error": tuple(zip(*curve, strict=True))}
        panels.append((result["model"], series))
    early, late = EARLY_LATE
    text = (
        f"Relative error of the states, median over {N_PROMPTS} prompts; growth: token {late} over {early}."
    )
    one = ShownTable(
        TITLE + ": components", text,
        ("model", "component", "perturbation", "at token 0", "at token 32", "growth"), tuple(parts),
    )  # fmt: skip
    text = (
        "Gaussian noise on A_log; alpha h is added to the recurrence. With alpha slow channels grow without bound, and "
        "the absolute error with them: the relative error falls for a trivial reason as well."
    )
    two = ShownTable(
        TITLE + ": identity term", text,
        ("model", "alpha", "relative", "against 0", "absolute", "state", "largest multiplier"), tuple(sweep),
    )  # fmt: skip

    def pictures() -> list[Any]:
        return [
            curves(
                panels, "mamba", TITLE, text, ("alpha [share of the last state]", "relative error [ratio]")
            )
        ]

    return Shown([one, two], claims, pictures, lines)


TABLES.register("mamba")(
    PaperTable(
        ("Table 21",),
        TITLE,
        "Mamba 130M, layer 12: relative error 0.127 without the term, 0.130, 0.120, 0.111, 0.101 with alpha 0.10, "
        "0.15, 0.25, 0.50. A_log's error is 0 at the first token and grows 1.28 to 2.00x from token 8 to 32; out_proj "
        "moves no state.",
        measure,
        show,
        refuses,
        one_step=True,
    )
)
