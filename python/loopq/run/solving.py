"""Solve all layers of a plan, by the kind of inputs that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from loopq.calibrate.hessians import Hessians
from loopq.quantizers.task import Task
from loopq.run.inputs import Inputs
from loopq.run.plan import Plan
from loopq.run.source import Layers, ModelSource, Source


@singledispatch
def solve(inputs: Inputs, plan: Plan, source: Source) -> Layers:
    """Collect and solve all layers of a plan; each kind of inputs registers its own way.

    Parameters
    ----------
    inputs : Inputs
        Those of the plan's settings.
    plan : Plan
        What happens to each layer.
    source : Source
        Gives weights, Hessians and metrics; a model where the inputs run it between layers.

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
    for chosen, hessians, metrics in source.parts(plan, tasks):
        done.update(source.solver(plan, hessians, metrics, journal).run(chosen))
    return {t.name: done[t.name] for t in tasks}


def solve_from(plan: Plan, source: ModelSource, hessians: Hessians) -> Layers:
    """Solve from Hessians that are there; loop metrics are collected where they are missing.

    Parameters
    ----------
    plan : Plan
        What happens to each layer.
    source : ModelSource
        The model. Inputs other than those of the full-precision rollout are collected besides.
    hessians : Hessians
        As of `ModelSource.all_steps`.
    """
    source.collect_metrics(plan, hessians, plan.tasks)
    inputs = plan.config.inputs
    if inputs.runs_between:
        return solve(inputs, plan, source)
    return source.solver(plan, hessians, source.metrics, source.journal(plan, "layers")).run(plan.tasks)
