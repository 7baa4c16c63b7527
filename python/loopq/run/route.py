"""The single path from settings to a checkpoint, for every source."""

from __future__ import annotations

from loopq.formats.checkpoint import Checkpoint
from loopq.run.allocate import allocate
from loopq.run.auto import choose_metric
from loopq.run.config import QuantConfig
from loopq.run.estimate import estimate
from loopq.run.outside import round_outside
from loopq.run.plan import Plan
from loopq.run.result import assemble
from loopq.run.solving import solve
from loopq.run.source import DumpSource, Source
from loopq.settings.execution import at_most


def prepare(source: Source, config: QuantConfig) -> Plan:
    """Plan a quantization. For a model, also choose the metric and report the cost.

    Raises
    ------
    ConfigError
        The source or the memory limit does not support the settings.
    """
    plan = source.plan(config)
    model = source.with_model()
    if model is not None:
        plan = choose_metric(plan, model)
        told = f"{len(plan.tasks)} layers, {model.job.selection.n_steps} steps"
        model.execution.progress.note(f"{told}: {estimate(plan, model)}")
    elif isinstance(source, DumpSource):
        needs = at_most(source.solve_bytes(plan))
        source.execution.progress.note(
            f"{len(plan.tasks)} layers, {source.facts()['n_steps']} steps: {needs}"
        )
    return plan


def carry_out(plan: Plan, source: Source) -> Checkpoint:
    """Choose bits if there is a budget, solve all layers, and combine them with the rest of the model."""
    facts = {}
    asked, model = plan.config.fit, source.with_model()
    if asked is not None and model is not None:
        config, facts["allocation"] = allocate(plan, model, asked)
        plan = source.plan(config)
    layers = solve(plan.config.inputs, plan, source)
    outside = {} if model is None else round_outside(plan, model)
    return assemble(plan, source, layers | outside, facts)
