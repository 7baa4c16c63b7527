"""What the quality tables do not show: spikes, defaults, adapters, scores, mixed bits, one plain layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.select import select
from loopq.evaluate.compare import compare
from loopq.evaluate.stats import spearman
from loopq.gradients.scores import loop_fisher, measured
from loopq.paper.models import PLBERT, PreparedModel, Sizes, prepare_model
from loopq.paper.quality import LOOP, SolutionCache
from loopq.quantizers.base import Problem
from loopq.quantizers.config import LayerConfig
from loopq.run.allocate import Candidate, choose_bits
from loopq.run.config import QuantConfig

Rows = list[dict[str, Any]]
Check = Callable[[Any, list[str], Sizes, Path | None, int], Rows]
CD = {"method": "gptq-cd", "metric": "inputs", "damping_kind": "mean"}
SAFE = {"step_weights": "balanced", "damping_kind": "diagonal"}
SPIKED = {"sum, mean": {}, "balanced, diagonal": SAFE, "sum, diagonal, loop metric": LOOP}
KAPPAS = (1.0, 1e2, 1e4, 1e6)
#: 3 bits and a 16 bit scale for 64 weights: 3.25 bits a weight.
UNIFORM = (3, 64)


class Bench:
    """One model, loaded at its first use."""

    def __init__(self, name: str, sizes: Sizes, data: Path | None, threads: int) -> None:
        self._open = (name, sizes, data)
        self._threads = threads
        self._solutions: SolutionCache | None = None

    @property
    def solutions(self) -> SolutionCache:
        if self._solutions is None:
            self._solutions = SolutionCache(prepare_model(*self._open), self._threads)
        return self._solutions

    @property
    def model(self) -> PreparedModel:
        return self.solutions.model

    def layers(self, layer: dict[str, Any], steps: str = "all", asymmetric: bool = False) -> Any:
        return self.solutions.closed(QuantConfig.of(**layer, steps=steps, rank_threshold=None), asymmetric)

    def measure(self, variants: dict[str, Any]) -> dict[str, Any]:
        weights = {k: {n: x.in_model_orientation() for n, x in v.items()} for k, v in variants.items()}
        found = compare(self.model.loaded.system, weights, self.model.evaluation)
        return {m.name: m for m in found[1:]}


def each(
    check: str, cache: Any, models: list[str], make: Callable[[str], Any], kinds: tuple[str, ...] = ("",)
) -> Iterator[tuple[str, Any]]:
    """Short name and result of every small model whose name contains one of the kinds, if it has a result."""
    for name in models:
        if name != PLBERT and any(kind in Path(name).name for kind in kinds):
            result = cache.get({"check": check, "model": Path(name).name}, lambda name=name: make(name))
            if result:
                yield Path(name).name, result


def adapters(cache: Any, models: list[str], sizes: Sizes, data: Path | None, threads: int) -> Rows:
    """Per-channel INT4 on models with an adapter: agreement with full precision."""

    def make(name: str) -> dict[str, Any]:
        bench = Bench(name, sizes, data, threads)
        grid = {"bits": 4, "group_size": -1}
        variants = {
            "RTN": bench.layers({"method": "rtn", "scale_search": "max"} | grid),
            "GPTQ, trajectory": bench.layers({"method": "gptq", "scale_search": "max"} | grid),
            "gptq-cd": bench.layers(CD | grid),
            "gptq-cd, loop metric": bench.layers(LOOP | grid),
        }
        found = bench.measure(variants)
        return {
            k: {"agreement": float(m.agreement.mean()), "kl": float(m.kl.mean())} for k, m in found.items()
        }

    kept = each("adapters", cache, models, make, ("huginn", "rllama"))
    return [
        {"model": name, "variant": variant} | row for name, result in kept for variant, row in result.items()
    ]


def exposure(cache: Any, models: list[str], sizes: Sizes, data: Path | None, threads: int) -> Rows:
    """Rank correlation over layers of predicted with measured KL of one layer quantized alone."""

    def make(name: str) -> dict[str, Any]:
        bench = Bench(name, sizes, data, threads)
        layers = bench.layers({"method": "rtn", "scale_search": "max", "bits": 4, "group_size": 128})
        candidates = {(n, "INT4"): x.in_model_orientation() for n, x in layers.items()}
        system, tokens = bench.model.loaded.system, bench.model.calibration.take(0, 48)
        truth = list(measured(system, candidates, tokens).values())
        guess = list(loop_fisher(system, candidates, tokens, n_draws=8).values())
        return {
            "n_layers": len(candidates),
            "spearman": spearman(truth, guess),
            "layers": [n for n, _ in candidates],
            "measured": truth,
            "predicted": guess,
        }

    return [{"model": name} | result for name, result in each("exposure", cache, models, make)]


def mixed(cache: Any, models: list[str], sizes: Sizes, data: Path | None, threads: int) -> Rows:
    """Bits by score, by size and at random, all within the bytes of uniform INT3 g64 (3.25 bits a weight)."""
    kept = each("mixed", cache, models, lambda name: _mixed(Bench(name, sizes, data, threads)))
    return [
        {"model": name, "variant": variant} | row for name, result in kept for variant, row in result.items()
    ]


def _mixed(bench: Bench) -> dict[str, Any]:
    solved = {
        (b, g): bench.layers(CD | {"bits": b, "group_size": g}) for b in (2, 3, 4, 8) for g in (32, 64, 128)
    }
    candidates = {
        (n, f"{b}:{g}"): x.in_model_orientation() for (b, g), v in solved.items() for n, x in v.items()
    }
    system, tokens = bench.model.loaded.system, bench.model.calibration.take(0, 24)
    budget = sum(x.n_bytes for x in solved[UNIFORM].values())
    costs = {
        "by ablation": measured(system, candidates, tokens),
        "by loop-Fisher": loop_fisher(system, candidates, tokens, n_draws=4),
    }
    rng = np.random.default_rng(0)
    names = list(solved[UNIFORM])
    lucky = {n: float(v) for n, v in zip(names, rng.lognormal(sigma=1.0, size=len(names)), strict=True)}
    size = {n: float(x.codes.size) for n, x in solved[UNIFORM].items()}
    error = {
        (n, f"{b}:{g}"): float(x.report["weight_error"]) ** 2
        for (b, g), v in solved.items()
        for n, x in v.items()
    }
    costs["at random"] = {k: lucky[k[0]] * e for k, e in error.items()}
    costs["by size"] = {k: e / size[k[0]] for k, e in error.items()}
    variants = {"uniform INT3 g64": solved[UNIFORM]}
    chosen: dict[str, Any] = {}
    inputs = select(system, tokens).input_groups
    together: dict[str, tuple[str, ...]] = {}
    for n in names:
        together[inputs[n]] = (*together.get(inputs[n], ()), n)
    apart: list[tuple[str, ...]] = [(n,) for n in names]
    asked = [(variant, cost, apart) for variant, cost in costs.items()]
    asked.append(("by ablation, one grid for an input", costs["by ablation"], list(together.values())))
    for variant, cost, sets in asked:
        choices = [
            Candidate(s, b, sum(v[n].n_bytes for n in s), sum(cost[n, f"{b}:{g}"] for n in s), g)
            for (b, g), v in solved.items()
            for s in sets
        ]
        found = [(n, c.bits, c.group_size) for c in choose_bits(choices, budget) for n in c.layers]
        variants[variant] = {n: solved[b, g][n] for n, b, g in found}
        chosen[variant] = {n: f"INT{b} g{g}" for n, b, g in found}
    kl = {k: float(m.kl.mean()) for k, m in bench.measure(variants).items()}
    base = kl["uniform INT3 g64"]
    return {
        k: {
            "kl": kl[k],
            "less": 1 - kl[k] / base,
            "n_bytes": sum(x.n_bytes for x in v.values()),
            "layers": chosen.get(k),
        }
        for k, v in variants.items()
    }


def defaults(cache: Any, models: list[str], sizes: Sizes, data: Path | None, threads: int) -> Rows:
    """Step weightings that need no knob against the best of N-step, skip-0, alpha and last step; INT3 g32."""
    kept = each("defaults", cache, models, lambda name: _defaults(Bench(name, sizes, data, threads)))
    return [
        {
            "model": name,
            "variant": variant,
            "best": result["best"],
            "over_best": over,
            "noise": result["noise"][variant],
        }
        for name, result in kept
        for variant, over in result["over_best"].items()
    ]


def _defaults(bench: Bench) -> dict[str, Any]:
    n = bench.model.loaded.system.n_steps
    grid = CD | {"bits": 3, "group_size": 32}
    fixed = {
        "N-step": bench.layers(grid),
        "skip-0": bench.layers(grid, "1:" if n > 1 else "all"),
        "last step": bench.layers(grid, str(n - 1)),
    } | {f"alpha {a}": bench.layers(grid | {"step_weights": f"alpha={a}"}) for a in (0.05, 0.15, 0.25, 0.5)}
    free = {
        "balanced, diagonal": bench.layers(grid | SAFE),
        "sum, diagonal, loop metric": bench.layers(grid | LOOP),
    }
    found = bench.measure(fixed | free)
    kl = {k: float(m.kl.mean()) for k, m in found.items()}
    spread = {k: found[k].kl.mean(axis=0) for k in kl}
    best = min(fixed, key=lambda k: kl[k])
    judged = (*free, "N-step")
    return {
        "best": best,
        "kl": kl,
        "over_best": {k: kl[k] / kl[best] - 1 for k in judged},
        "noise": {
            k: float(np.std(spread[k] - spread[best]) / len(spread[k]) ** 0.5 / kl[best]) for k in judged
        },
    }


def spikes(cache: Any, models: list[str], sizes: Sizes, data: Path | None, threads: int) -> Rows:
    """Codes that change when one hidden unit is made kappa times louder; the planted column itself is left out."""
    kept = each(
        "spikes", cache, models, lambda name: _spikes(name, sizes, data, threads),
        ("huginn", "rllama", "ouro", "nanbeige", "parcae"),
    )  # fmt: skip
    return [{"model": name} | row for name, result in kept for row in result["rows"]]


def _spikes(name: str, sizes: Sizes, data: Path | None, threads: int) -> dict[str, Any]:
    import torch

    from benches.zoo.planted import plant_kappa_spike
    from loopq.models.load import describe

    plain = prepare_model(name, dataclasses.replace(sizes, n_calibration=24), data)
    ids = torch.from_numpy(np.stack(plain.calibration.sequences[:8]))
    solved: dict[tuple[str, float], Any] = {}
    units: dict[str, int] = {}
    for kappa in KAPPAS:
        model, units = plant_kappa_spike(plain.loaded.model, ids, kappa)
        loaded = dataclasses.replace(
            plain.loaded,
            model=model,
            system=type(plain.loaded.system)(model),
            report=describe(model, name, "planted"),
        )
        solutions = SolutionCache(dataclasses.replace(plain, loaded=loaded), threads)
        for label, extra in SPIKED.items():
            layer = CD | extra | {"bits": 4, "group_size": 128, "scale_dtype": "float32"}
            solved[label, kappa] = solutions.closed(QuantConfig.of(**layer, rank_threshold=None), False)
    rows = []
    for label in SPIKED:
        # From 100 on the planted column rounds to nothing, so that its group has one scale for all larger kappa.
        for kappa in KAPPAS[2:]:
            share = _changed(solved[label, KAPPAS[1]], solved[label, kappa], units)
            rows.append({"weighting": label, "kappa": kappa, "against": KAPPAS[1], "changed": share})
        rows.append(
            {"weighting": label, "kappa": KAPPAS[1], "against": 1.0,
             "changed": _changed(solved[label, 1.0], solved[label, KAPPAS[1]], units)}
        )  # fmt: skip
    return {"rows": rows}


def _changed(a: Any, b: Any, units: dict[str, int]) -> float:
    """Share of codes that differ, the planted columns left out; a sign turned with its scale is no change."""
    different = total = 0
    for name, layer in a.items():
        keep = np.ones(layer.codes.shape[1], dtype=bool)
        for mlp, unit in units.items():
            if name.startswith(mlp) and ("down" in name or "mlp.proj" in name):
                keep[unit] = False
        different += int((layer.codes[:, keep] != b[name].codes[:, keep]).sum())
        total += int(keep.sum()) * layer.codes.shape[0]
    return different / total


def plain_layer(cache: Any, models: list[str], sizes: Sizes, data: Path | None, threads: int) -> Rows:
    """One 2048 x 2048 layer without a loop: W ~ N, inputs with a rank-1 common part; INT4 g128, no g_idx."""
    result = cache.get({"check": "plain layer"}, lambda: {"rows": _plain(threads)})
    return list((result or {}).get("rows", []))


def _plain(threads: int, rows: int = 512, dim: int = 2048) -> Rows:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(rows, dim)).astype(np.float32)
    x = rng.normal(size=(2 * dim, dim)) + 0.3 * rng.normal(size=(2 * dim, 1)) * rng.normal(size=(1, dim))
    hessian: NDArray[np.float64] = x.T @ x
    total = native.proxy(weight, np.zeros_like(weight), hessian, threads=threads)
    variants: dict[str, dict[str, Any]] = {
        "RTN": {"method": "rtn", "scale_search": "max"},
        "GPTQ, no order": {"method": "gptq", "scale_search": "max"},
        "GPTQ, static act-order": {
            "method": "gptq",
            "act_order": True,
            "scales": "static",
            "scale_search": "max",
        },
        "GPTQ, static act-order, searched scales": {
            "method": "gptq",
            "act_order": True,
            "scales": "static",
        },
        "gptq-cd": CD,
    }
    out = []
    for variant, layer in variants.items():
        config = LayerConfig.of(**layer, bits=4, group_size=128)
        problem = Problem("layer", weight, hessian, config.grid, threads=threads)
        found = config.quantize(problem).dequantize()
        out.append(
            {"variant": variant, "proxy": native.proxy(weight, found, hessian, threads=threads) / total}
        )
    return out


CHECKS: dict[str, Check] = {
    "plain layer": plain_layer,
    "exposure": exposure,
    "adapters": adapters,
    "mixed": mixed,
    "spikes": spikes,
    "defaults": defaults,
}
_COLUMNS = {
    "plain layer": [("variant", "variant", ""), ("proxy", "relative proxy", ".3e")],
    "exposure": [("model", "model", ""), ("n_layers", "layers", "d"), ("spearman", "Spearman", ".3f")],
    "adapters": [
        ("model", "model", ""), ("variant", "variant", ""), ("agreement", "agreement", ".4f"), ("kl", "KL", ".5f"),
    ],
    "mixed": [
        ("model", "model", ""), ("variant", "variant", ""), ("n_bytes", "bytes", ",d"), ("kl", "KL", ".5f"),
        ("less", "less than uniform", ".3f"),
    ],
    "spikes": [
        ("model", "model", ""), ("weighting", "step weights, damping", ""), ("kappa", "kappa", "g"),
        ("against", "against", "g"), ("changed", "codes changed", ".5f"),
    ],
    "defaults": [
        ("model", "model", ""), ("variant", "variant", ""), ("best", "best fixed", ""),
        ("over_best", "KL over the best", "+.3f"), ("noise", "standard error", ".3f"),
    ],
}  # fmt: skip


def check_tables(checks: dict[str, Rows], table: Callable[..., str]) -> list[str]:
    """Give the parts of the report."""
    parts: list[str] = []
    for name, rows in checks.items():
        if rows:
            about = (CHECKS[name].__doc__ or "").strip().splitlines()[0]
            parts += [f"## {name}", "", about, "", table(rows, _COLUMNS[name]), ""]
    return parts
