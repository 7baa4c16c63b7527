"""Which layer costs most when it is rounded alone, and does the final error rise with what is fed back? With intervals.

Run: python benches/diagnose/places.py MODEL... [--n-prompts 128] [--seeds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet, windows
from loopq.diagnose.feedback import feedback_curve, split_weights
from loopq.diagnose.rollouts import run_variants, trace
from loopq.diagnose.survey import setting_name
from loopq.diagnose.weights import as_stored, quantizable, rounded, weight_of
from loopq.evaluate.stats import geometric_mean_ratio, mean_interval
from loopq.models.load import load_model
from loopq.models.replace import replaced
from loopq.quantizers.config import LayerConfig
from loopq.systems.base import LoopedSystem
from loopq.terminal.table import render
from loopq.zoo import evaluation_text

Floats = NDArray[np.float64]

SETTINGS = ((4, -1), (4, 128), (4, 64), (4, 32), (3, -1), (3, 128))
LAMBDAS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
N_RESAMPLES = 20_000


def damages(
    system: LoopedSystem, tokens: TokenSet, bits: int, group_size: int, seeds: int
) -> dict[str, dict[str, Floats]]:
    """Damage of each layer rounded alone, by measure: one number for each prompt, mean over paired start states."""
    config = LayerConfig.of(method="rtn", scale_search="max", bits=bits, group_size=group_size)
    every = rounded(system, quantizable(system.shared_parameters(system.n_steps)), config)
    variants = {name: {name: value} for name, value in every.items()}
    totals: dict[str, dict[str, Floats]] = {name: {} for name in variants}
    for seed in range(seeds):
        for name, run in run_variants(system, tokens, system.n_steps, variants, seed=seed).items():
            assert run.kl is not None
            values = {
                "changed": 1.0 - run.agreement.mean(axis=1),
                "changed, last step": 1.0 - run.agreement[:, -1],
                "KL, last step": run.kl[:, -1],
            }
            for key, value in values.items():
                totals[name][key] = totals[name].get(key, 0.0) + value / seeds
    return totals


def places(damage: dict[str, dict[str, Floats]], exposed: str) -> dict[str, Any]:
    """Place of the exposed layer, its lead over the worst of the others, and how sure that is, by measure."""
    out = {}
    rng = np.random.default_rng(0)
    for key in damage[exposed]:
        table = {name: values[key] for name, values in damage.items()}
        means = {name: float(v.mean()) for name, v in table.items()}
        order = sorted(means, key=lambda name: -means[name])
        rival = next(name for name in order if name != exposed)
        stacked = np.stack(list(table.values()))
        index = list(table).index(exposed)
        first = 0
        for _ in range(N_RESAMPLES // 1000):
            drawn = rng.integers(0, stacked.shape[1], (1000, stacked.shape[1]))
            first += int((stacked[:, drawn].mean(axis=2).argmax(axis=0) == index).sum())
        out[key] = {
            "place": order.index(exposed) + 1,
            "of": len(order),
            "exposed": mean_interval(table[exposed], n_resamples=N_RESAMPLES).to_json(),
            "rival": rival,
            "rival_mean": means[rival],
            "lead": mean_interval(table[exposed] - table[rival], n_resamples=N_RESAMPLES).to_json(),
            "first_in_resamples": first / N_RESAMPLES,
            "means": means,
        }
    return out


def weight_errors(system: LoopedSystem, bits: int, group_size: int) -> dict[str, dict[str, float]]:
    """Scales a row and ||dW|| / ||W|| of each layer; of a concatenated input the size of both halves too."""
    config = LayerConfig.of(method="rtn", scale_search="max", bits=bits, group_size=group_size)
    out = {}
    for p in quantizable(system.shared_parameters(system.n_steps)):
        w = weight_of(system, p)
        (value,) = rounded(system, [p], config).values()
        width = p.in_features if group_size == -1 else group_size
        out[p.name] = {
            "groups": float(-(-p.in_features // width)),
            "relative": float(np.linalg.norm(value - w) / np.linalg.norm(w)),
        }
        if p.exposed and p.in_features == 2 * p.out_features:
            largest = np.abs(w).reshape(p.out_features, 2, p.out_features).max(axis=2)
            out[p.name]["state_over_embedding"] = float(np.median(largest[:, 0] / largest[:, 1]))
    return out


def lambda_curve(
    system: LoopedSystem, tokens: TokenSet, bits: int, group_size: int, seeds: int
) -> dict[str, Any]:
    """Final error against the share that is fed back, each share against none: ratio over prompts."""
    config = LayerConfig.of(method="rtn", scale_search="max", bits=bits, group_size=group_size)
    weights = split_weights(system, system.n_steps, config)["all columns"]
    curve = feedback_curve(
        system, tokens, system.n_steps, weights, lambdas=LAMBDAS, seeds=tuple(range(seeds))
    )
    ratios = [
        geometric_mean_ratio(curve.error[i], curve.error[0], n_resamples=N_RESAMPLES).to_json()
        for i in range(1, len(LAMBDAS))
    ]
    return {
        "lambdas": list(LAMBDAS),
        "error": curve.error.mean(axis=1).tolist(),
        "ratio_to_none": ratios,
        "n_prompts": int(curve.error.shape[1]),
        "n_seeds": seeds,
        "cosine": mean_interval(_cosines(system, tokens, weights), n_resamples=N_RESAMPLES).to_json(),
    }


def _cosines(system: LoopedSystem, tokens: TokenSet, weights: Any) -> Floats:
    """Cosine of the last step's fresh error with the error that the step before hands on through the loop."""
    import torch

    n = system.n_steps
    found = []
    for batch in tokens.batches(8, 0):
        reference = trace(system, batch, n, read=(n,))
        with torch.no_grad():
            e = system.embed(batch)
            with replaced(system, as_stored(system, weights, n)):
                before = system.step(reference.states[n - 2], e, n - 2, n)
                after = system.step(reference.states[n - 1], e, n - 1, n)
                handed = system.step(before, e, n - 1, n) - after
            fresh = after - reference.states[n]
        a, b = fresh.flatten(1).double(), handed.flatten(1).double()
        found.append(torch.nn.functional.cosine_similarity(a, b, dim=1).numpy())
    return np.concatenate(found)


def study(model: str, n_prompts: int, seeds: int) -> dict[str, Any]:
    """Everything of one model."""
    loaded = load_model(model)
    system = loaded.system
    tokens = windows(evaluation_text().decode(), loaded.encode, 128, n_prompts, "embedded evaluation text")
    (exposed,) = [p.name for p in system.shared_parameters(system.n_steps) if p.exposed]
    found: dict[str, Any] = {
        "model": Path(model).name,
        "n_prompts": n_prompts,
        "n_seeds": seeds,
        "exposed": exposed,
    }
    found["settings"] = {
        setting_name(bits, group): {
            "places": places(damages(system, tokens, bits, group, seeds), exposed),
            "weights": weight_errors(system, bits, group),
        }
        for bits, group in SETTINGS
    }
    half = tokens.take(0, max(1, n_prompts // 2))
    found["feedback"] = {
        setting_name(bits, group): lambda_curve(system, half, bits, group, seeds)
        for bits, group in ((4, -1), (4, 128), (3, -1), (3, 128))
    }
    return found


def _span(interval: dict[str, Any], scale: float = 1.0) -> str:
    return (
        f"{scale * interval['estimate']:.3f} [{scale * interval['low']:.3f}, {scale * interval['high']:.3f}]"
    )


def tables(found: dict[str, Any]) -> str:
    """Both tables of one model."""
    rows = []
    for setting, parts in found["settings"].items():
        p = parts["places"]["changed"]
        kl = parts["places"]["KL, last step"]
        rows.append(
            (
                setting,
                f"{p['place']} of {p['of']}",
                _span(p["exposed"], 100),
                p["rival"].removeprefix("transformer.").removesuffix(".weight"),
                _span(p["lead"], 100),
                f"{100 * p['first_in_resamples']:.0f} %",
                f"{kl['place']} of {kl['of']}",
            )
        )
    head = (
        "rounding",
        "place",
        "changed alone [%]",
        "strongest other",
        "lead over it [points]",
        "first",
        "by KL",
    )
    text = render(head, rows)
    curves = []
    for setting, c in found["feedback"].items():
        ratios = {lam: _span(r) for lam, r in zip(c["lambdas"][1:], c["ratio_to_none"], strict=True)}
        curves.append((setting, *(ratios[lam] for lam in (0.125, 0.25, 0.5, 1.0)), _span(c["cosine"])))
    columns = ("rounding", "0.125", "0.25", "0.5", "1", "cosine")
    return (
        f"{found['model']}\n{text}\n\nfinal error against that without feedback\n{render(columns, curves)}\n"
    )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--n-prompts", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for model in args.models:
        results.append(study(model, args.n_prompts, args.seeds))
        print(tables(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
