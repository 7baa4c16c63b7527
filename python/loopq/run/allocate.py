"""Bits and group size of each layer under a byte budget."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.gradients.scores import loop_fisher, measured
from loopq.quantizers.config import Override
from loopq.quantizers.task import Task
from loopq.run.budget import Allocate, Candidate, choose_bits
from loopq.run.config import QuantConfig
from loopq.run.plan import Plan
from loopq.run.solving import solve_from
from loopq.run.source import ModelSource
from loopq.settings.steps import Calibration


def allocate(plan: Plan, source: ModelSource, asked: Allocate) -> tuple[QuantConfig, dict[str, Any]]:
    """Choose bits and group size of every layer of a run, the same for layers that read the same input.

    Parameters
    ----------
    plan : Plan
        Its layers are quantized open loop, by its settings, as every candidate asks.
    source : ModelSource
        The model.
    asked : Allocate
        Budget, score and candidates.

    Returns
    -------
    QuantConfig
        The run's settings with an override for every layer.
    dict
        What was asked, what it came to and what it cost, for the report.

    Notes
    -----
    Inference engines put q, k and v, or gate and up, into one matrix of one scheme; these are the layers of one input.
    """
    sums = source.all_steps(plan, "allocate")
    config = dataclasses.replace(plan.config, allocate=None)
    plain = config.layer.changed(step_weights=Calibration().step_weights)
    if plain.method.gradients:
        plain = plain.changed(metric="inputs")
    # By layer, bits and group size; an override may have fixed either: then several candidates are one and the same.
    sizes: dict[tuple[str, int, int], tuple[int, int, int]] = {}
    weights: dict[tuple[str, str], NDArray[np.float32]] = {}
    for bits in asked.bits:
        for group in asked.group_sizes:
            settings = dataclasses.replace(config, layer=plain.changed(bits=bits, group_size=group))
            # Scores compare layers, one at a time: each on the inputs of full precision.
            candidate = source.plan(settings.changed(inputs="open"))
            for name, layer in solve_from(candidate, source, sums).items():
                grid = layer.grid
                sizes[name, bits, group] = grid.bits, grid.group_size, layer.n_bytes
                weights[_key(name, grid.bits, grid.group_size)] = layer.in_model_orientation()
    costs = _costs(plan, source, weights, asked)
    candidates = []
    for names in _alike(plan.tasks):
        for bits, group in itertools.product(asked.bits, asked.group_sizes):
            found = [(name, *sizes[name, bits, group]) for name in names]
            n_bytes, cost = sum(n for *_, n in found), sum(costs[_key(n, b, g)] for n, b, g, _ in found)
            candidates.append(Candidate(names, bits, n_bytes, cost, group))
    n_weights = sum(t.parameter.in_features * t.parameter.out_features for t in plan.tasks)
    chosen = choose_bits(candidates, asked.n_bytes(n_weights))
    grids = {}
    for c in chosen:
        for name in c.layers:
            own_bits, own_group, _ = sizes[name, c.bits, c.group_size]
            grids[name] = {"bits": own_bits, "group_size": own_group}
    own = tuple(Override(f"re:^{re.escape(name)}$", grid) for name, grid in grids.items())
    n_bytes = sum(c.n_bytes for c in chosen)
    return dataclasses.replace(config, overrides=(*config.overrides, *own)), {
        "asked": asked.to_json(),
        "budget_bytes": asked.n_bytes(n_weights),
        "n_bytes": n_bytes,
        "bits_a_weight": 8 * n_bytes / n_weights,
        "predicted_cost": sum(c.cost for c in chosen),
        "layers": grids,
    }


def _key(name: str, bits: int, group_size: int) -> tuple[str, str]:
    return name, f"INT{bits} g{group_size}"


def _alike(tasks: Sequence[Task]) -> list[tuple[str, ...]]:
    """Names of the layers that read one input, in the order of the tasks; layers without activations stand alone."""
    sets: dict[str, list[str]] = {}
    for task in tasks:
        sets.setdefault(task.input_group or task.name, []).append(task.name)
    return [tuple(names) for names in sets.values()]


def _costs(
    plan: Plan,
    source: ModelSource,
    weights: Mapping[tuple[str, str], NDArray[np.float32]],
    asked: Allocate,
) -> dict[tuple[str, str], float]:
    job, execution, journal = source.job, source.execution, source.journal(plan, "scores")
    progress = execution.progress
    tokens = job.tokens.take(0, asked.n_prompts)
    n_steps = job.selection.n_steps
    if asked.score == "fisher":
        return loop_fisher(job.system, weights, tokens, n_steps=n_steps, execution=execution, journal=journal)
    costs: dict[tuple[str, str], float] = {}
    progress.start("ablation", len(plan.tasks), "layers")
    for task in plan.tasks:
        # All candidates of a layer share one full-precision rollout, and a kill loses no more than them.
        own = {key: weight for key, weight in weights.items() if key[0] == task.name}
        piece = journal.find(task.name)
        found = dict(piece.facts["costs"]) if piece else None
        if found is None:
            costs_of_own = measured(job.system, own, tokens, n_steps=n_steps, seed=execution.seed)
            found = {key[1]: cost for key, cost in costs_of_own.items()}
            journal.save(task.name, costs=found)
        costs |= {(task.name, label): cost for label, cost in found.items()}
        progress.advance()
    progress.stop()
    return costs
