"""Choice of each layer's grid and of the storage of matrices outside the loop, within a file size."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.evaluation.compare import compare
from loopq.layers.layer import Dequantized
from loopq.quantizers.config import Override
from loopq.run.budget import SCORED, Candidate, Fit, choose
from loopq.run.memory import fit_parts
from loopq.run.model_source import ModelSource
from loopq.run.outside import tell_left
from loopq.run.plan import Plan, alike
from loopq.run.solving import solve_from, solve_outside
from loopq.settings.steps import Calibration
from loopq.storage.schema import Object
from loopq.storage.weights import ModelWeights

#: Bytes of a tensor's entry in the head of a safetensors file besides its name, and tensors of a quantized layer.
_ENTRY, _TENSORS = 61, 3
#: Possible bits of the matrices outside the loop, unless they stay unchanged.
_OUTSIDE: tuple[Literal[8, 4], ...] = (8, 4)
#: The settings, the grid's label and the bytes of layers on one grid.
_Found = dict[str, tuple[Object, str, int]]


def allocate(plan: Plan, source: ModelSource) -> Plan:
    """Choose the grid of every layer within the plan's `fit`, equal for layers of one input, and "outside".

    Parameters
    ----------
    plan : Plan
        Plan with the layers. All candidates are quantized open loop, by its settings. Without `fit` it is returned.
    source : ModelSource
        The model. It also provides the calibration set.

    Returns
    -------
    Plan
        Plan of the run's settings with an override for every layer. Its facts have request, size and cost.

    Notes
    -----
    Inference engines fuse q, k and v, or gate and up, into one matrix of one scheme. These are the layers of one input.
    """
    asked = plan.config.fit
    if asked is None:
        return plan
    config = dataclasses.replace(plan.config, fit=None)
    outside = _outside(dataclasses.replace(plan, config=config), source)
    candidates = [*_inside(plan, source, asked), *outside]
    tensors = source.weights.tensors
    n_weights = sum(math.prod(t.shape) for t in tensors.values())
    rest = _rest(source.weights, {name for c in candidates for name in c.layers})
    chosen = choose(candidates, asked.n_bytes(n_weights) - rest, rest)
    n_bytes = rest + sum(c.n_bytes for c in chosen)
    grids = {name: grid for c in chosen if c not in outside for name, grid in c.choice.items()}
    overrides = tuple(Override(f"re:^{re.escape(name)}$", grid) for name, grid in grids.items())
    for c in (c for c in chosen if c in outside):
        config = dataclasses.replace(config, outside=c.choice[c.layers[0]]["outside"])
    facts = {
        "asked": asked.to_json(),
        "budget_bytes": asked.n_bytes(n_weights),
        "n_bytes": n_bytes,
        "bits_a_weight": 8 * n_bytes / n_weights,
        "predicted_cost": sum(c.cost for c in chosen),
        "chosen": [
            {"layers": list(c.layers), "n_bytes": c.n_bytes, "cost": c.cost, **c.choice[c.layers[0]]}
            for c in chosen
        ],
        "layers": grids,
    }
    allocated = source.plan(dataclasses.replace(config, overrides=(*config.overrides, *overrides)))
    tell_left(allocated, source.job, source.weights)
    return dataclasses.replace(allocated, facts={"allocation": facts})


def _rest(weights: ModelWeights, named: set[str]) -> int:
    """Bytes of everything that is not chosen: other tensors, and the head of the file."""
    head = sum(
        _TENSORS * (len(name) + len("_packed") + _ENTRY) + 16 if name in named else len(name) + _ENTRY
        for name in weights.tensors
    )
    return head + sum(int(t.data.size) for name, t in weights.tensors.items() if name not in named)


def _inside(plan: Plan, source: ModelSource, asked: Fit) -> list[Candidate]:
    """Candidates of the loop's layers, each quantized by the run's method without gradients, in parts that fit."""
    config = dataclasses.replace(plan.config, fit=None)
    plain = config.layer.changed(step_weights=Calibration().step_weights)
    if plain.method.gradients:
        plain = plain.changed(metric="inputs")
    grids, allowed = [], asked.grids(plain.grid)
    for choice in allowed:
        try:
            layer = plain.changed(**choice)
        except ConfigError:
            continue  # The method does not have this grid.
        # Scores compare single layers, each on the inputs of full precision.
        grids.append((choice, source.plan(dataclasses.replace(config, layer=layer).changed(inputs="open"))))
    if not grids:
        raise ConfigError(f"method {plain.method.name} has none of the grids: change --set fit_bits=...")
    # An override may fix a part of the grid. Then several candidates are identical.
    trials: list[_Found] = [{} for _ in grids]
    costs: dict[tuple[str, str], float] = {}
    sums = source.sums(plan, per_step=True)
    for number, tasks in enumerate(fit_parts(source.job, plan.tasks, sums, len(allowed))):
        part = dataclasses.replace(plan, tasks=tuple(tasks))
        costs |= _costs(part, source, _solved(part, source, f"fit-{number}", grids, trials))
    candidates = []
    for names in (tuple(t.name for t in group) for group in alike(plan.tasks)):
        for of_grid in trials:
            n_bytes = sum(of_grid[name][2] for name in names)
            cost = sum(costs[name, of_grid[name][1]] for name in names)
            candidates.append(Candidate(names, n_bytes, cost, {name: of_grid[name][0] for name in names}))
    return candidates


def _solved(
    part: Plan, source: ModelSource, name: str, grids: Sequence[tuple[Object, Plan]], trials: Sequence[_Found]
) -> dict[tuple[str, str], NDArray[np.float32]]:
    """Solve the layers of a part on each grid. Return the weights, and add the rest to `trials`."""
    # Rounding reads no text.
    observed = any(task.input_group for task in part.tasks)
    sums = source.all_steps(part, name) if observed else source.sums(part, ())
    weights = {}
    for number, (of_grid, (choice, whole)) in enumerate(zip(trials, grids, strict=True), 1):
        named = ", ".join(f"{key} {value}" for key, value in choice.items())
        source.execution.progress.note(
            f"fit: grid {number} of {len(grids)} ({named}), {len(part.tasks)} layers"
        )
        by_name = {t.name: t for t in whole.tasks}
        candidate = dataclasses.replace(whole, tasks=tuple(by_name[t.name] for t in part.tasks))
        for layer in solve_from(candidate, source, sums).values():
            grid = by_name[layer.name].config.grid
            label = f"{layer.grid.label} g{layer.grid.group_size}"
            of_grid[layer.name] = ({key: getattr(grid, key) for key in choice}, label, layer.n_bytes)
            weights[layer.name, label] = layer.in_model_orientation()
    return weights


def _outside(plan: Plan, source: ModelSource) -> list[Candidate]:
    """Candidates of all matrices outside the loop together: unchanged, 8 bits, 4 bits; or only the requested one."""
    job, requested = source.job, plan.config.outside
    rounded = {
        outside: solve_outside(source.plan(dataclasses.replace(plan.config, outside=outside)), source)
        for outside in (_OUTSIDE if requested is None else (requested,))
    }
    names = tuple(next(iter(rounded.values())))
    if not names:
        return []
    variants = {str(outside): Dequantized(layers) for outside, layers in rounded.items()}
    tokens, seed = job.tokens.take(0, SCORED), source.execution.seed
    _, *measured = compare(job.system, variants, tokens, n_steps=job.selection.n_steps, seeds=(seed,))
    kept: list[tuple[Any, int, float]] = [
        (outside, sum(layer.n_bytes for layer in layers.values()), float(m.kl.mean()))
        for (outside, layers), m in zip(rounded.items(), measured, strict=True)
    ]
    if requested is None:
        kept.append((None, sum(int(source.weights.tensors[name].data.size) for name in names), 0.0))
    return [Candidate(names, size, cost, {n: {"outside": o} for n in names}) for o, size, cost in kept]


def _costs(
    plan: Plan, source: ModelSource, weights: Mapping[tuple[str, str], NDArray[np.float32]]
) -> dict[tuple[str, str], float]:
    """KL of each candidate: the model with only that layer quantized."""
    job, execution = source.job, source.execution
    journal = source.journal(plan, "scores", [t.name for t in plan.tasks])
    progress = execution.progress
    tokens = job.tokens.take(0, SCORED)
    n_steps = job.selection.n_steps
    costs: dict[tuple[str, str], float] = {}
    progress.start("ablation", len(weights), "trials")
    for task in plan.tasks:
        # All candidates of a layer share one full-precision rollout. A kill loses only these.
        piece = journal.find(task.name)
        task_costs = dict(piece.facts["costs"]) if piece else None
        if task_costs is None:
            variants = {label: {name: w} for (name, label), w in weights.items() if name == task.name}
            each = compare(job.system, variants, tokens, n_steps=n_steps, seeds=(execution.seed,))[1:]
            task_costs = {label: float(m.kl.mean()) for label, m in zip(variants, each, strict=True)}
            journal.save(task.name, costs=task_costs)
        costs |= {(task.name, label): cost for label, cost in task_costs.items()}
        progress.advance(len(task_costs))
    progress.stop()
    return costs
