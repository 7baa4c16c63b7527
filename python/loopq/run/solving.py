"""Solve all layers of a plan with its kind of inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import singledispatch

from loopq.calibrate.hessians import Hessians
from loopq.quantizers.task import Task
from loopq.run.inputs import Inputs
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan
from loopq.run.source import Layers, Source


@singledispatch
def solve(inputs: Inputs, plan: Plan, source: Source) -> Layers:
    """Collect and solve all layers of a plan. Each kind of inputs registers its own function.

    Parameters
    ----------
    inputs : Inputs
        Inputs of the plan's settings.
    plan : Plan
        Treatment of each layer.
    source : Source
        Source of weights, Hessians and metrics. It must be a model if the inputs run it between layers.

    Returns
    -------
    dict of str to QuantizedLayer
        The layers, in the order of the tasks.
    """
    raise NotImplementedError(type(inputs).__name__)


def solve_parts(plan: Plan, source: Source, tasks: Sequence[Task]) -> Layers:
    """Solve some layers on the inputs of the full-precision rollout, part by part."""
    done: Layers = {}
    journal = source.journal(plan, "layers")
    # Closed here instead of by the collector: a stored traceback would keep the sums on disk.
    with contextlib.closing(source.parts(plan, tasks)) as parts:
        for chosen, hessians, metrics in parts:
            done.update(source.solver(plan, hessians, metrics, journal).run(chosen))
    return {t.name: done[t.name] for t in tasks}


def solve_outside(plan: Plan, source: Source) -> Layers:
    """Round the matrices outside the loop. Most plans have none."""
    return solve_parts(plan, source, plan.outside) if plan.outside else {}


def solve_from(plan: Plan, source: ModelSource, hessians: Hessians) -> Layers:
    """Solve from given Hessians. Missing loop metrics are collected.

    Parameters
    ----------
    plan : Plan
        Treatment of each layer.
    source : ModelSource
        The model. Inputs other than those of the full-precision rollout are collected in addition.
    hessians : Hessians
        As in `ModelSource.all_steps`.
    """
    source.collect_metrics(plan, hessians, plan.tasks)
    inputs = plan.config.inputs
    if inputs.runs_between:
        return solve(inputs, plan, source)
    return source.solver(plan, hessians, source.metrics, source.journal(plan, "layers")).run(plan.tasks)
