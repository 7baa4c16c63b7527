"""The one way from settings to a checkpoint, whatever the source."""

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
from loopq.run.source import ModelSource, Source


def prepare(source: Source, config: QuantConfig) -> Plan:
    """Plan a quantization; of a model, decide about the loop metric and tell what the run will take.

    Raises
    ------
    ConfigError
        Settings that the source cannot serve, or that memory cannot.
    """
    plan = source.plan(config)
    if isinstance(source, ModelSource):
        plan = choose_metric(plan, source)
        told = f"{len(plan.tasks)} layers, {source.job.selection.n_steps} steps"
        source.execution.progress.note(f"{told}: {estimate(plan, source)}")
    return plan


def carry_out(plan: Plan, source: Source) -> Checkpoint:
    """Choose bits where a budget is given, solve all layers, and put them and the rest of the model together."""
    facts = {}
    asked = plan.config.fit
    if asked is not None and isinstance(source, ModelSource):
        config, facts["allocation"] = allocate(plan, source, asked)
        plan = source.plan(config)
    layers = solve(plan.config.inputs, plan, source)
    return assemble(plan, source, layers | round_outside(plan, source), facts)
