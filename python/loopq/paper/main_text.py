"""The main table (Li, Table 2) in words: estimates with intervals, sentences and tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.evaluation.stats import Interval, mean_interval
from loopq.paper.compared import CALIBRATION, closer, ratio
from loopq.paper.shown import Claim, ShownTable
from loopq.paper.stats import cluster_rate, gap_closed, student
from loopq.storage.schema import Object

GRIDS = ((4, 128), (3, 32))
RTN, ONE, ALL = "RTN", "one step", "N steps"
N_RESAMPLES = 10_000
Floats = NDArray[np.float64]


def summarize(results: Sequence[Mapping[str, Any]]) -> Object:
    """Compute the record of a run: every number of the tables, with its interval.

    Parameters
    ----------
    results : sequence of dict
        Results of `loopq.paper.tables.main.measure`.

    Returns
    -------
    dict
        `models` has the variants of each model and grid and their comparisons. It also has the model's ranks and
        states. `training_seeds` is the gap closed over models that differ only in their training seed.
    """
    models = [summarize_model(m) for m in results]
    return {"models": models, "training_seeds": _training_seeds(models)}


def summarize_model(result: Mapping[str, Any]) -> Object:
    """Intervals, comparisons and verdicts of one model."""
    kept = ("model", "system", "n_steps", "output", "task", "looped", "ranks", "settings", "seconds")
    out: Object = {k: result[k] for k in kept}
    bits = _to_bits(result["bytes_per_token"])
    if result["full_precision"] is not None:
        out["bits_per_byte"] = _interval(bits(np.array(result["full_precision"])))
    grids = []
    for n_bits, group in GRIDS:
        variants = on_grid(result, n_bits, group)
        rtn = _per_prompt(variants[RTN]["kl"])
        rows = {
            name: _variant(variant, rtn, result["full_precision"], bits) for name, variant in variants.items()
        }
        claims = comparisons(result["model"], variants)
        pairs = {name: _json(claim.interval) for name, claim in claims.items()}
        # The ordering of Li, Table 2: N steps are better than rounding and than one step.
        both = [claims[f"{ALL} / {other}"].holds for other in (RTN, ONE)]
        holds = False if False in both else None if None in both else True
        grids.append({"bits": n_bits, "group_size": group, "variants": rows, "ratios": pairs, "holds": holds})
    out["grids"] = grids
    out["states"] = _states(result["states"])
    return out


def on_grid(result: Mapping[str, Any], bits: int, group: int) -> dict[str, Mapping[str, Any]]:
    """Variants of one grid, by name."""
    return {a["variant"]: a for a in result["variants"] if (a["bits"], a["group_size"]) == (bits, group)}


def _to_bits(bytes_per_token: float | None) -> Callable[[Floats], Floats]:
    width = (bytes_per_token or 1.0) * float(np.log(2.0))
    return lambda nll: nll / width


def _per_prompt(by_seed: Sequence[Sequence[float]]) -> Floats:
    """Mean over calibration seeds of each prompt's value."""
    mean: Floats = np.array(by_seed, dtype=np.float64).mean(axis=0)
    return mean


def _json(interval: Interval) -> dict[str, float]:
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}


def _interval(values: Floats) -> dict[str, float]:
    return _json(mean_interval(values, n_resamples=N_RESAMPLES))


def _variant(
    variant: Mapping[str, Any],
    rtn: Floats,
    base_nll: Sequence[float] | None,
    bits: Callable[[Floats], Floats],
) -> Object:
    kl = _per_prompt(variant["kl"])
    gaps = [gap_closed(float(np.mean(k)), float(rtn.mean()), 0.0) for k in variant["kl"]]
    left = _json(ratio(kl, rtn))
    out: Object = {
        "n_bytes": variant["n_bytes"],
        "kl": _interval(kl),
        "agreement": _interval(_per_prompt(variant["agreement"])),
        "gap_closed": {
            "estimate": 1 - left["estimate"], "low": 1 - left["high"], "high": 1 - left["low"]
        },
        "gap_closed_over_seeds": _json(student(gaps)) if len(gaps) > 1 else None,
    }  # fmt: skip
    if base_nll is not None:
        nll, base = bits(_per_prompt(variant["nll"])), bits(np.array(base_nll))
        out["bits_per_byte"] = _interval(nll)
        out["bits_lost"] = _interval(nll - base)
    return out


def comparisons(model: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Claim]:
    """Claims on the KL of one grid's variants (Li, Table 2): each pair of N steps, one step and rounding.

    Parameters
    ----------
    model : str
        Name of the model.
    variants : mapping of str to dict
        Results of `loopq.paper.tables.main.measure` by variant.
    """
    kl = {name: _per_prompt(v["kl"]) for name, v in variants.items()}
    pairs = ((ALL, RTN), (ALL, ONE), (ONE, RTN))
    return {f"{a} / {b}": closer(model, f"{a} better than {b}", kl[a], kl[b], CALIBRATION) for a, b in pairs}


def _training_seeds(models: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Gap closed over models of one kind that differ in their training seed."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for m in models:
        kinds.setdefault(re.sub(r"_seed\d+$", "", m["model"]), []).append(m)
    out = []
    for kind, group in kinds.items():
        if len(group) < 2:
            continue
        for number, (bits, width) in enumerate(GRIDS):
            grids = [m["grids"][number] for m in group]
            for variant in (ONE, ALL):
                gaps = [g["variants"][variant]["gap_closed"]["estimate"] for g in grids]
                out.append(
                    {
                        "kind": kind, "bits": bits, "group_size": width, "variant": variant,
                        "gap_closed": _json(student(gaps)), "by_seed": gaps, "models": [m["model"] for m in group],
                        "holds": sum(bool(g["holds"]) for g in grids),
                    }
                )  # fmt: skip
    return out


def _states(states: Mapping[str, Any] | None) -> Object | None:
    if states is None:
        return None
    out: Object = {"probe": states["probe"], "weights": {}}
    for name, row in states.items():
        if name == "probe":
            continue
        masked = np.array(row["masked"], dtype=np.float64)
        rates = {
            key: _json(cluster_rate(row[key], masked, n_resamples=N_RESAMPLES)) for key in ("hits", "same")
        }
        out["weights"][name] = {
            "error": row["error"],
            "cosine": row["cosine"],
            "n_masked": int(masked.sum()),
        } | rates
    return out


def tables(record: Mapping[str, Any]) -> list[ShownTable]:
    """Build every table of a record, in order."""
    models = record["models"]
    shown = [_grid_table(models, number) for number in range(len(GRIDS))]
    shown += [_ordering_table(models), _seeds_table(record["training_seeds"]), _ranks_table(models)]
    shown += [_states_table(m) for m in models if m["states"]]
    return [t for t in shown if t.rows]


def headline(record: Mapping[str, Any]) -> list[str]:
    """Lines that give the number of models where the ordering holds."""
    lines = []
    for number, (bits, group) in enumerate(GRIDS):
        cases = [bool(m["grids"][number]["holds"]) for m in record["models"]]
        lines.append(
            f"INT{bits} g{group}: N steps are better than rounding and than one step on {sum(cases)} of {len(cases)} "
            "models."
        )
    return lines


def _span(value: Mapping[str, float] | None, digits: int) -> str | None:
    if value is None:
        return None
    return f"{value['estimate']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def _kl(value: Mapping[str, float]) -> str:
    return f"{value['estimate']:.3g} [{value['low']:.3g}, {value['high']:.3g}]"


def _grid_table(models: Sequence[Mapping[str, Any]], number: int) -> ShownTable:
    rows: list[tuple[str | None, ...]] = []
    for m in models:
        grid = m["grids"][number]
        base = f"{m['bits_per_byte']['estimate']:.3f}" if "bits_per_byte" in m else None
        rows.append((m["model"], str(m["n_steps"]), "full precision", None, None, base, None, None, None))
        best = min((RTN, ONE, ALL), key=lambda a: grid["variants"][a]["kl"]["estimate"])
        for name in (RTN, ONE, ALL):
            variant = grid["variants"][name]
            over = variant["gap_closed_over_seeds"]
            rows.append(
                (
                    "", "", name + " *" * (name == best), _kl(variant["kl"]), _span(variant["agreement"], 3),
                    f"{variant['bits_per_byte']['estimate']:.3f}" if base else None, _span(variant.get("bits_lost"), 3),
                    None if name == RTN else _span(variant["gap_closed"], 2),
                    _span(over, 2),
                )
            )  # fmt: skip
    bits, group = GRIDS[number]
    # Notes on single models appear only if the table contains one of them.
    hidden = [m["model"] for m in models if "bits_per_byte" not in m]
    tasks = {m["model"]: m["task"] for m in models if m["task"] != "text"}
    return ShownTable(
        f"INT{bits}, group size {group}",
        "KL(full precision || quantized) in nats, top-1 agreement, bits per byte and their increase over full "
        "precision, on held-out prompts; gap closed = 1 - KL / KL of RTN. Brackets: 95 %, bootstrap over prompts; last "
        "column: gap closed over calibration seeds, 95 % Student. * smallest KL."
        + "".join(
            f" {name} has no logits: squared relative error of the final hidden state in place of KL, its cosine in "
            "place of agreement."
            for name in hidden
        )
        + "".join(f" {name} is measured on {task} instead of text." for name, task in tasks.items()),
        (
            "model",
            "N",
            "weights",
            "KL",
            "agreement",
            "bits per byte",
            "bits lost",
            "gap closed",
            "over seeds",
        ),
        tuple(rows),
    )


def _ordering_table(models: Sequence[Mapping[str, Any]]) -> ShownTable:
    rows = [
        (
            m["model"], f"INT{g['bits']} g{g['group_size']}",
            *(_span(g["ratios"].get(k), 2) for k in (f"{ALL} / {RTN}", f"{ALL} / {ONE}", f"{ONE} / {RTN}")),
            {True: "holds", False: "does not hold", None: "is left open"}[g["holds"]],
        )
        for m in models
        for g in m["grids"]
    ]  # fmt: skip
    return ShownTable(
        "Does the paper's ordering hold?",
        "Li, Table 2: N-step calibration is better than rounding and than one step. Ratios of mean KL on the same "
        "prompts, 95 % paired bootstrap over prompts; below 1 the first is better.",
        ("model", "grid", "N steps / RTN", "N steps / one step", "one step / RTN", "verdict"),
        tuple(rows),
    )


def _seeds_table(seeds: Sequence[Mapping[str, Any]]) -> ShownTable:
    rows = [
        (
            r["kind"], f"INT{r['bits']} g{r['group_size']}", r["variant"], str(len(r["by_seed"])),
            _span(r["gap_closed"], 2), ", ".join(f"{v:.2f}" for v in r["by_seed"]),
            f"{r['holds']} of {len(r['by_seed'])}",
        )
        for r in seeds
    ]  # fmt: skip
    return ShownTable(
        "Over training seeds",
        "Gap closed by models trained from several seeds: mean, 95 % Student. The model of a kind without a number was "
        "trained longer than the others (docs/zoo.md).",
        ("kind", "grid", "calibration", "models", "gap closed", "each", "ordering holds"),
        tuple(rows),
    )


def _ranks_table(models: Sequence[Mapping[str, Any]]) -> ShownTable:
    rows: list[tuple[str | None, ...]] = []
    tau = models[0]["ranks"]["threshold"] if models else 0.0
    for m in models:
        classes: dict[str, list[Mapping[str, Any]]] = {}
        for layer in m["ranks"]["layers"]:
            classes.setdefault(layer["class"], []).append(layer)
        for number, (name, layers) in enumerate(classes.items()):
            marked = any(layer["layer"] == m["ranks"]["bottleneck"] for layer in layers)
            ranks = [f"{np.mean([layer[k] for layer in layers]):.0f}" for k in ("first", "last", "all")]
            gains = [layer["gain"] for layer in layers if layer["gain"] is not None]
            gain = (
                None if not gains else f"{np.mean(gains):.1f}" + f" (max {max(gains):.1f})" * (len(gains) > 1)
            )
            rows.append(
                (
                    "" if number else m["model"], name + " *" * marked, str(len(layers)), str(layers[0]["n_inputs"]),
                    *ranks, gain,
                )
            )  # fmt: skip
    return ShownTable(
        "Rank survey",
        f"Number of eigenvalues of the input Hessian above {tau:g} of the largest, by class of layer, mean over its "
        "layers; first calibration seed. Trajectory: the sum over steps. Gain: trajectory over step 0. * contains the "
        "layer with the lowest step-0 rank over width.",
        ("model", "layers", "count", "width", "step 0", "last step", "trajectory", "gain"),
        tuple(rows),
    )


def _states_table(model: Mapping[str, Any]) -> ShownTable:
    states = model["states"]
    probe = states["probe"]
    depth = model["n_steps"]
    shown = sorted({1, 2, 4, 8, depth} & set(range(1, depth + 1)))
    rows = [
        (
            name,
            *(f"{100 * w['error'][n - 1]:.2f}" for n in shown),
            *(f"{w['cosine'][n - 1]:.5f}" for n in (1, depth)),
            _span({k: 100 * v for k, v in w["hits"].items()}, 1),
            _span({k: 100 * v for k, v in w["same"].items()}, 1),
        )
        for name, w in states["weights"].items()
    ]
    n_masked = next(iter(states["weights"].values()))["n_masked"]
    return ShownTable(
        f"{model['model']}: hidden states by step, and a probe",
        "Relative error (%) and cosine of the states after a step, mean over prompts. Probe: "
        f"{100 * probe['mask_share']:.0f} % of the phonemes are replaced by the padding token (id {probe['mask_id']}); "
        "a ridge regression from the final state of such a position to its phoneme, fitted on "
        f"{probe['n_positions']:,} positions of the validation split at full precision, predicts it at {n_masked:,} "
        "positions of the test split: share of correct predictions, and share equal to the prediction at full "
        "precision, 95 % prompt-cluster bootstrap. First calibration seed.",
        (
            "weights", *(f"error, step {n}" for n in shown), *(f"cosine, step {n}" for n in (1, depth)),
            "probe correct %", "probe unchanged %",
        ),
        tuple(rows),
    )  # fmt: skip
