"""Weights outside the loop, rounded to nearest: embedding tables, heads, layers before and after the loop."""

from __future__ import annotations

import dataclasses

from loopq.quantizers.config import LayerConfig
from loopq.quantizers.rtn import RTN
from loopq.quantizers.task import Task
from loopq.run.plan import LEAST, Plan, outside
from loopq.run.source import Layers, ModelSource


def round_outside(plan: Plan, source: ModelSource) -> Layers:
    """Round the matrices outside the loop to the bits of the plan's `outside`. Without `outside`, do nothing.

    These are the weights of linear layers and embedding tables that the adapter does not list. They run once per token,
    outside the loop, so their error does not accumulate. At 8 bits it is far below the cost of the loop's own bits.
    Scales are searched, and groups are those of the run's grid.
    """
    if plan.config.outside is None:
        return {}
    tasks = tasks_outside(plan, source)
    rounded, weights = {t.name for t in tasks}, source.weights.tensors
    for name, reason in source.job.system.left_out().items():
        shape = weights[name].shape if name in weights and name not in rounded else ()
        if len(shape) == 2 and min(shape) >= LEAST:
            source.execution.progress.note(f"not rounded outside the loop: {name}: {reason}")
    empty = source.sums(dataclasses.replace(plan, tasks=()))
    return source.solver(plan, empty, {}, source.journal(plan, "outside")).run(tasks) if tasks else {}


def tasks_outside(plan: Plan, source: ModelSource) -> list[Task]:
    """The layers that `round_outside` rounds."""
    asked = plan.config.outside
    if asked is None:
        return []
    grid = plan.config.layer.grid
    if isinstance(asked, str):
        grid = dataclasses.replace(grid, bits=4, group_size=128, levels=asked, symmetric=True)
    else:
        # Tables and floats have at most 4 bits.
        levels = grid.chosen if asked == 4 else "even"
        grid = dataclasses.replace(grid, bits=asked, symmetric=True, levels=levels)
        if grid.grid().bits != asked:  # a type of GGUF has bits of its own
            grid = dataclasses.replace(grid, levels="even")
    config = LayerConfig(grid=grid, method=RTN(scale_search="mse"))
    job = source.job
    return [Task(p, config, (), None) for p in outside(job.system, job.selection.parameters)]
