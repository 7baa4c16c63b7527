"""Rank the layers by sensitivity: ablation, random-direction gain and Hessian trace (Li, App. G)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.rollouts import Comparison, run_variants
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.analysis.diagnosis.weights import quantizable, rounded, weight_of
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import Observer
from loopq.errors import ConfigError
from loopq.evaluation.stats import spearman
from loopq.layers.grid import PER_CHANNEL
from loopq.layers.shared import SharedParameter
from loopq.quantizers.config import LayerConfig
from loopq.storage.schema import Object

if TYPE_CHECKING:
    from loopq.analysis.diagnosis.context import Context
    from loopq.calibrate.data import TokenSet
    from loopq.layers.shared import SharedParameter
    from loopq.systems.base import LoopedSystem


Floats = NDArray[np.float64]


def ablation(
    context: Context, config: LayerConfig, *, parameters: Sequence[SharedParameter] | None = None
) -> dict[str, Object]:
    """Round one layer at a time and measure the change of the output (Li, Table 16).

    Parameters
    ----------
    context : Context
        Model, prompts and depth. Li, Table 16 uses 10 prompts.
    config : LayerConfig
        Bits and group size.
    parameters : sequence of SharedParameter, optional
        Layers. By default all that a run quantizes.

    Returns
    -------
    dict of str to dict
        For each layer, `changed` is the share of positions with another top-1 prediction. It is the mean over all
        steps, or the last step alone without a single-step function. `output_error` is the relative error of the
        output, mean over steps. `changed_last`, `kl_last` and `output_error_last` belong to the last step. `by_prompt`
        lists the first available one by prompt. Hidden states have None for `changed`, `changed_last` and `kl_last`.

    Notes
    -----
    It takes one rollout of the prompts per layer and one for the reference.
    """
    chosen = quantizable(context.parameters) if parameters is None else list(parameters)
    every = rounded(context.system, chosen, config, context.rounder)
    variants = {name: {name: value} for name, value in every.items()}
    comparisons = run_variants(context, variants, label="ablation")
    return {name: _ablated(run) for name, run in comparisons.items()}


def _ablated(run: Comparison) -> Object:
    error = run.curve("output_error")
    out: Object = {
        "by_prompt": run.output_error.mean(axis=1).tolist(),
        "changed": None,
        "changed_last": None,
        "kl_last": None,
        "output_error": float(error.mean()),
        "output_error_last": float(error[-1]),
    }
    if run.matches is not None:
        agreement = run.curve("agreement")
        out |= {
            "by_prompt": (1.0 - run.agreement.mean(axis=1)).tolist(),
            "changed": float(1.0 - agreement.mean()),
            "changed_last": float(1.0 - agreement[-1]),
            "kl_last": float(run.curve("kl")[-1]),
        }
    return out


def random_direction_gain(
    apply: Callable[[Floats], Floats], x: Floats, n_draws: int = 10, relative: float = 1e-3, seed: int = 0
) -> float:
    """Mean of ||f(x + d) - f(x)||_F / ||d||_F over random directions d = relative * ||x||_F * z (Li, App. G).

    Parameters
    ----------
    apply : callable
        The layer. It maps rows (n_rows, in_features) to rows (n_rows, out_features).
    x : float64 ndarray of shape (n_rows, in_features)
        Captured input.
    n_draws : int
        Gaussian draws z.
    relative : float
        Norm of d relative to that of x.
    seed : int
        Seed of the draws.

    Notes
    -----
    For a linear layer the input cancels. The expected gain is about ||W||_F / sqrt(in_features) and does not depend on
    the layer's position in the loop.
    """
    if n_draws < 1:
        raise ConfigError(f"n_draws must be at least 1; got {n_draws}")
    rng = np.random.default_rng(seed)
    base = apply(x)
    size = relative * float(np.linalg.norm(x))
    gains = []
    for _ in range(n_draws):
        d = size * rng.normal(size=x.shape)
        gains.append(float(np.linalg.norm(apply(x + d) - base) / np.linalg.norm(d)))
    return float(np.mean(gains))


def last_inputs(
    system: LoopedSystem, tokens: TokenSet, n_steps: int, parameters: Sequence[SharedParameter], seed: int = 0
) -> dict[str, list[Floats]]:
    """Input rows of each layer's last invocation, one float64 array (n_rows, in_features) per prompt."""
    inputs: dict[str, list[Floats]] = {p.name: [] for p in parameters}

    def keep(parameter: SharedParameter, step: int, rows: Any) -> None:
        if step == parameter.invocations - 1:
            inputs[parameter.name].append(rows.double().cpu().numpy().copy())

    with Observer(system, parameters, keep) as observer:
        for batch in tokens.batches(1, seed):
            with observer.rollout(batch):
                system.rollout(batch, n_steps)
    return inputs


def gains(
    system: LoopedSystem,
    tokens: TokenSet,
    n_steps: int,
    *,
    weights: Mapping[str, NDArray[np.float32]],
    n_draws: int = 10,
    seed: int = 0,
) -> dict[str, float]:
    """Random-direction gain of every layer in `weights` that has inputs, mean over prompts (Li, App. G).

    Parameters
    ----------
    weights : mapping of str to float32 ndarray of shape (out_features, in_features)
        Unchanged weights. A bias cancels and is not needed.
    n_steps : int
        Depth of the rollout. Its last inputs are perturbed. Li, App. G uses 16 of 32.
    """
    parameters = [p for p in system.shared_parameters(n_steps) if p.name in weights]
    inputs = last_inputs(system, tokens, n_steps, parameters, seed)
    out = {}
    for p in parameters:
        w = weights[p.name].astype(np.float64)
        per_prompt = [
            random_direction_gain(lambda x, w=w: x @ w.T, x, n_draws, seed=seed + i)  # type: ignore[misc]
            for i, x in enumerate(inputs[p.name])
        ]
        # The last step may route no row to an expert.
        if per_prompt:
            out[p.name] = float(np.mean(per_prompt))
    return out


def places(values: Mapping[str, float | None]) -> dict[str, int | None]:
    """Rank of each layer, 1 for the largest value. Ties keep the order of the layers and None stays None."""
    known = [(name, value) for name, value in values.items() if value is not None]
    order = sorted(range(len(known)), key=lambda i: (-known[i][1], i))
    ranks: dict[str, int | None] = dict.fromkeys(values)
    for place, index in enumerate(order, start=1):
        ranks[known[index][0]] = place
    return ranks


def rank_table(measures: Mapping[str, Mapping[str, float | None]], truth: str) -> Object:
    """Rank the layers by several measures and correlate these with one of them.

    Parameters
    ----------
    measures : mapping of measure to mapping of layer to value
        Larger is more sensitive.
    truth : str
        The reference measure of the correlations.

    Returns
    -------
    dict
        `places` maps layer and measure to the rank. `spearman` maps a measure to its rank correlation with `truth`
        over the layers with both values. It is None for fewer than three layers. `truth` names the reference.
    """
    ranked = {name: places(values) for name, values in measures.items()}
    layers = list(measures[truth])
    correlation: dict[str, float | None] = {}
    for name, values in measures.items():
        pairs = [
            (a, b)
            for a, b in ((values.get(layer), measures[truth][layer]) for layer in layers)
            if a is not None and b is not None
        ]
        rho = spearman(*zip(*pairs, strict=True)) if len(pairs) > 2 else float("nan")
        correlation[name] = None if np.isnan(rho) else rho
    table = {layer: {name: ranked[name].get(layer) for name in measures} for layer in layers}
    return {"places": table, "spearman": correlation, "truth": truth}


def layer_table(context: Context) -> Object:
    """Single-layer ablation, random-direction gain and Hessian trace, side by side (Li, Table 16)."""
    config = context.config
    tokens = context.tokens.take(0, config.n_ablation_prompts)
    chosen = quantizable(context.parameters)

    def rounded_alone(group_size: int) -> dict[str, Object]:
        return ablation(context.on(tokens), config.layer(group_size), parameters=chosen)

    grouped, whole = rounded_alone(config.group_size), rounded_alone(PER_CHANNEL)
    # Li, App. G perturbs the inputs of step 16 of 32.
    middle = context.system.check_depth(max(1, context.n_steps // 2))
    weights = {p.name: weight_of(context.system, p) for p in chosen}
    gain = gains(context.system, tokens, middle, weights=weights, seed=context.execution.seed)
    trace = _input_energy(context, tokens)
    key = "changed" if context.system.output == "logits" else "output_error"
    measures: dict[str, dict[str, float | None]] = {
        "ablation": {name: values[key] for name, values in grouped.items()},
        "ablation per channel": {name: values[key] for name, values in whole.items()},
        "random-direction gain": {name: gain.get(name) for name in grouped},
        "Hessian trace": {name: trace.get(name) for name in grouped},
    }
    return {
        "measure": key,
        "layers": {
            name: values | {"gain": gain.get(name), "trace": trace.get(name), "per_channel": whole[name]}
            for name, values in grouped.items()
        },
        "table": rank_table(measures, "ablation"),
        "n_prompts": len(tokens.sequences),
    }


def _input_energy(context: Context, tokens: TokenSet) -> dict[str, float]:
    """tr(X^T X) of each observed layer over all steps, its sum of squared inputs (Li, App. G)."""
    total: dict[str, float] = {}

    def add(p: SharedParameter, step: int, rows: Any) -> None:
        total[p.name] = total.get(p.name, 0.0) + float(rows.double().square().sum())

    with Observer(context.system, context.selection.observed, add) as observer:
        for batch in tokens.batches(context.execution.batch_size, context.execution.seed):
            with observer.rollout(batch):
                context.system.rollout(batch, context.n_steps)
    return total


def _rollouts(context: Context) -> int:
    n_prompts = min(context.config.n_ablation_prompts, len(context.tokens.sequences))
    return n_prompts * (2 * len(quantizable(context.parameters)) + 4)


SECTIONS.register("ablation")(Section(layer_table, 30, compares=True, rollouts=_rollouts))
