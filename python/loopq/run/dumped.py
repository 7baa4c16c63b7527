"""The loop metric in a dump: collected beside the Hessians, and read back by a solve that has no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loopq.calibrate.collect import Collection, HessianSet, collect_hessians, collected
from loopq.calibrate.dump import Dump, GradientSums
from loopq.errors import ConfigError
from loopq.gradients.collect_metrics import collect_metrics
from loopq.quantizers.loop_metric import LoopMetric, n_gradient_prompts
from loopq.quantizers.task import Metrics, Task
from loopq.run.config import QuantConfig
from loopq.run.outside import refuse_outside
from loopq.run.plan import plan
from loopq.storage.journal import Journal

if TYPE_CHECKING:
    from loopq.run.engine import Run


@dataclass(frozen=True)
class MetricOfDump:
    """Collects loop metrics for `loopq.calibrate.collect.collect_hessians`.

    Parameters
    ----------
    job : Collection
        What is collected.
    n_prompts, n_draws : int
        Prompts that gradients are taken on, and label draws for each.
    """

    job: Collection
    n_prompts: int
    n_draws: int

    @classmethod
    def of(cls, job: Collection, most: int | None, n_draws: int) -> MetricOfDump:
        """Take at most so many of the prompts; a share of them where no number is given."""
        return cls(job, n_gradient_prompts(most, len(job.tokens.sequences)), n_draws)

    def collect(self, sums: HessianSet, input_groups: Sequence[str], work: Path) -> dict[str, GradientSums]:
        """Return the sums of each parameter that reads one of the inputs, over the steps that are summed there."""
        config = QuantConfig.of(
            method="gptq-cd", metric="loop", metric_prompts=self.n_prompts, metric_draws=self.n_draws
        )
        job = self.job
        tasks = [
            dataclasses.replace(t, steps=tuple(sums.steps[t.input_group]))
            for t in plan(job.selection.parameters, job.selection.input_groups, config)
            if t.input_group is not None and t.input_group in input_groups
        ]
        key = job.fingerprint([t.metric_key for t in tasks])
        found = collect_metrics(
            sums, job.system, job.tokens, tasks, job.selection.n_steps, job.execution, Journal(work, key)
        )
        return {name: GradientSums(m.left, m.right) for name, m in found.items()}


def refuse_rollouts(config: QuantConfig, who: str, instead: str) -> None:
    """Refuse settings that run the model once more after the Hessians are collected.

    Raises
    ------
    ConfigError
        The message says what `who` cannot do, and what to do instead.
    """
    if config.inputs.name != "open":
        raise ConfigError(
            f"inputs {config.inputs.name!r} run the model between layers, which {who} cannot: {instead}"
        )
    refuse_outside(config, f"{who} cannot", instead)
    if config.allocate is not None:
        raise ConfigError(f"allocate runs the model, which {who} cannot: {instead}")


def collect_dump(run: Run, out: Path) -> None:
    """Collect what a run needs to be solved from a dump; one that is there already is taken."""
    if collected(out):
        return
    tasks = [t for t in run.tasks if t.input_group]
    steps = sorted({step for t in tasks for step in t.steps})
    apart = any(
        t.step_weights != "sum" or list(t.steps) != [s for s in steps if s < t.parameter.invocations]
        for t in tasks
    )
    asked = {t.gradients for t in tasks if t.gradients}
    gradients = MetricOfDump.of(run.job, *asked.pop()) if asked else None
    collect_hessians(run.job, out, steps=steps, per_step=apart, gradients=gradients)


def settings_of(dump: Dump, config: QuantConfig) -> QuantConfig:
    """Put what a dump holds in the place of metric "auto": its loop metric with its counts, or that of the inputs."""
    if not dump.manifest.metrics:
        return config.with_metric("inputs")
    first = dump.manifest.metrics[0]
    return config.with_metric("loop", metric_prompts=first.n_prompts, metric_draws=first.n_draws)


def loop_metric(dump: Dump, name: str, steps: Sequence[int]) -> LoopMetric:
    """Read the loop metric of a layer.

    Raises
    ------
    DumpError
        The dump holds none for the layer, or over other steps.
    """
    sums, first = dump.gradient_sums(name, steps), dump.manifest.metrics[0]
    return LoopMetric(sums.left, sums.right, first.n_prompts * first.n_draws)


def metrics_of(dump: Dump, tasks: Sequence[Task]) -> Metrics:
    """Read the loop metric of every layer that asks for one.

    Raises
    ------
    DumpError
        The dump holds none for a layer, or over other steps.
    ConfigError
        Other counts of prompts or draws are asked for than the dump's.
    """
    found: Metrics = {}
    measured = {m.parameter for m in dump.manifest.metrics}
    for task in tasks:
        if task.gradients is None:
            continue
        if measured and task.parameter.routed_in and task.name not in measured:
            found[task.metric_key] = None
            continue
        metric = loop_metric(dump, task.name, task.steps)
        first, most = dump.manifest.metrics[0], task.gradients[0]
        asked = (n_gradient_prompts(most, int(dump.manifest.calibration["n_prompts"])), task.gradients[1])
        if asked != (first.n_prompts, first.n_draws):
            raise ConfigError(
                f"layer {task.name}: a loop metric over {asked[0]} prompts and {asked[1]} draws is asked for; the "
                f"dump's is over {first.n_prompts} and {first.n_draws}: give --metric-prompts {first.n_prompts} "
                f"--metric-draws {first.n_draws}, or collect again"
            )
        found[task.metric_key] = metric
    return found
