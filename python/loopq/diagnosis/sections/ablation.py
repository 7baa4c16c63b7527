"""Damage of each layer rounded alone, with two one-step measures (Li, Table 16)."""

from __future__ import annotations

from typing import Any

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import Observer
from loopq.diagnosis import sensitivity
from loopq.diagnosis.context import Context
from loopq.diagnosis.sections import SECTIONS, Section
from loopq.diagnosis.weights import quantizable, weight_of
from loopq.layers.grid import PER_CHANNEL
from loopq.layers.shared import SharedParameter
from loopq.storage.schema import Object


def ablation(context: Context) -> Object:
    """Single-layer ablation, random-direction gain and Hessian trace, side by side (Li, Table 16)."""
    config = context.config
    tokens = context.tokens.take(0, config.n_ablation_prompts)
    chosen = quantizable(context.parameters)

    def rounded_alone(group_size: int) -> dict[str, Object]:
        return sensitivity.ablation(context.on(tokens), config.layer(group_size), parameters=chosen)

    found, whole = rounded_alone(config.group_size), rounded_alone(PER_CHANNEL)
    # Li, App. G perturbs the inputs of step 16 of 32.
    middle = context.system.check_depth(max(1, context.n_steps // 2))
    weights = {p.name: weight_of(context.system, p) for p in chosen}
    gain = sensitivity.gains(context.system, tokens, middle, weights=weights, seed=context.execution.seed)
    trace = _input_energy(context, tokens)
    key = "changed" if context.system.output == "logits" else "output_error"
    measures: dict[str, dict[str, float | None]] = {
        "ablation": {name: values[key] for name, values in found.items()},
        "ablation per channel": {name: values[key] for name, values in whole.items()},
        "random-direction gain": {name: gain.get(name) for name in found},
        "Hessian trace": {name: trace.get(name) for name in found},
    }
    return {
        "measure": key,
        "layers": {
            name: values | {"gain": gain.get(name), "trace": trace.get(name), "per_channel": whole[name]}
            for name, values in found.items()
        },
        "table": sensitivity.rank_table(measures, "ablation"),
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


SECTIONS.register("ablation")(Section(ablation, 30, compares=True, rollouts=_rollouts))
