"""Feedback exposure: locate the damage of a weight error in the loop (Li, Sec. 3)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopq.analysis.diagnosis.rollouts import Comparison, run_variants, trace
from loopq.analysis.diagnosis.weights import (
    Matrix,
    Rounder,
    Weights,
    core_rounder,
    gaussian_like,
    quantizable,
    rounded,
    weight_of,
)
from loopq.errors import ConfigError
from loopq.evaluation.stats import mean_interval
from loopq.quantizers.config import LayerConfig
from loopq.storage.schema import Object
from loopq.systems.stepwise import steps_of

if TYPE_CHECKING:
    from loopq.analysis.diagnosis.context import Context
    from loopq.calibrate.data import TokenSet
    from loopq.systems.base import LoopedSystem

NONE, EXPOSED, CORE, ALL, GAUSSIAN = "none", "exposed", "core", "all", "gaussian"


def injection_weights(
    system: LoopedSystem,
    n_steps: int,
    config: LayerConfig,
    *,
    rounder: Rounder = core_rounder,
    noise_seed: int = 0,
) -> dict[str, Weights]:
    """Weights of the controlled-injection variants (Li, Table 3, with INT4 per channel).

    Returns
    -------
    dict of str to weights
        "exposed" rounds the layers without an identity path, "core" the others and "all" both. "none" rounds nothing.
        "gaussian" adds one draw (`noise_seed`) to each exposed layer with the Frobenius norm of its rounding error. A
        system without an exposed layer has "none" and "all".
    """
    parameters = quantizable(system.shared_parameters(n_steps))
    every = rounded(system, parameters, config, rounder)
    exposed = {p.name: every[p.name] for p in parameters if p.exposed}
    if not exposed:
        return {NONE: {}, ALL: every}
    noisy: dict[str, Matrix] = {}
    for index, p in enumerate(q for q in parameters if q.exposed):
        weight = weight_of(system, p)
        noisy[p.name] = gaussian_like(
            weight, float(np.linalg.norm(every[p.name] - weight)), noise_seed + index
        )
    core = {name: value for name, value in every.items() if name not in exposed}
    return {NONE: {}, EXPOSED: exposed, CORE: core, ALL: every, GAUSSIAN: noisy}


def controlled_injection(context: Context, config: LayerConfig) -> Object:
    """Round parts of the loop and compare, with paired and with unpaired initial states (Li, Table 3).

    Returns
    -------
    dict
        `paired` and `unpaired` map a variant to its curves over steps and the interval of its final agreement.
        `unpaired` is None where the initial state is not random. `recovered` is the share of the agreement lost by
        "all" that full-precision exposed layers recover (Li, Table 12).
    """
    seed = context.execution.seed
    variants = injection_weights(
        context.system, context.n_steps, config, rounder=context.rounder, noise_seed=seed
    )
    runs: Object = {
        "settings": {"bits": config.grid.bits, "group_size": config.grid.group_size, "seed": seed}
    }
    paired = run_variants(context, variants, label="paired")
    runs["paired"] = {name: _curves(comparison) for name, comparison in paired.items()}
    runs["unpaired"] = None
    if context.system.state_is_random:
        unpaired = run_variants(context, variants, variant_seed=seed + 1, label="unpaired")
        runs["unpaired"] = {name: _curves(comparison) for name, comparison in unpaired.items()}
    runs["recovered"] = _recovered(paired)
    return runs


def _curves(comparison: Comparison) -> Object:
    out = comparison.to_json()
    if comparison.matches is not None:
        out["final_agreement"] = mean_interval(comparison.agreement[:, -1], n_resamples=10_000).to_json()
    return out


def _recovered(variants: Mapping[str, Comparison]) -> float | None:
    if CORE not in variants or variants[ALL].matches is None:
        return None
    whole = float(variants[ALL].curve("agreement")[-1])
    protected = float(variants[CORE].curve("agreement")[-1])
    return (protected - whole) / (1.0 - whole) if whole < 1.0 else None


def group_size_sweep(
    context: Context, config: LayerConfig, group_sizes: Sequence[int] = (32, 64, 128, 256, -1)
) -> list[Object]:
    """Round the whole loop at several group sizes and compare at every step (Li, Table 17).

    Returns
    -------
    list of dict
        `group_size` (-1: per channel) and the curves of `Comparison.to_json`. Initial states are paired.
    """
    parameters = quantizable(context.parameters)
    variants = {
        str(g): rounded(context.system, parameters, config.changed(group_size=g), context.rounder)
        for g in group_sizes
    }
    comparisons = run_variants(context, variants, label="groups")
    return [{"group_size": g} | comparisons[str(g)].to_json() for g in group_sizes]


def adapter_output_ratio(
    system: LoopedSystem, tokens: TokenSet, n_steps: int, *, seed: int = 0, batch_size: int = 8
) -> dict[str, Object]:
    """Size of each exposed layer's output relative to the step's input state (Li, App. O).

    Returns
    -------
    dict of str to dict
        For each exposed layer, `per_step` is the mean over prompts of ||output|| / ||s_t|| at each update. `mean` and
        `std` run over prompts and all updates but the first.
    """
    steps = steps_of(system)
    if steps is None:
        raise ConfigError(f"system {system.name!r} has no single-step function: its states cannot be read")
    if steps.n_updates(n_steps) < 1:
        raise ConfigError(f"system {system.name!r}: at depth {n_steps} no state is updated before it is read")
    seen: dict[str, list[Any]] = {p.name: [] for p in system.shared_parameters(n_steps) if p.exposed}
    ratios: dict[str, list[Any]] = {name: [] for name in seen}
    with contextlib.ExitStack() as stack:
        for p in system.shared_parameters(n_steps):
            if p.exposed:
                hook = functools.partial(
                    lambda kept, module, args, out: kept.append(_size(out)), seen[p.name]
                )
                module = system.model.get_submodule(p.owners[0])
                stack.enter_context(module.register_forward_hook(hook))
        for batch in tokens.batches(batch_size, seed):
            sizes = [_size(state) for state in trace(system, batch, n_steps, read=()).states[:-1]]
            for name, kept in seen.items():
                ratios[name].append(np.stack([a / b for a, b in zip(kept, sizes, strict=True)]))
                kept.clear()
    by_layer = {}
    for name, parts in ratios.items():
        table = np.concatenate(parts, axis=1)
        late = table[1:] if len(table) > 1 else table
        by_layer[name] = {
            "per_step": table.mean(axis=1).tolist(),
            "mean": float(late.mean()),
            "std": float(late.std()),
        }
    return by_layer


def _size(states: Any) -> Any:
    return states.detach().double().flatten(1).norm(dim=1).cpu().numpy()
