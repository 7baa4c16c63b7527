"""The loop metric in a dump, beside the Hessians; and the dump that a plan needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loopq.calibrate.hessian_dump import HessianDump
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.sums_file import GradientSums
from loopq.gradients.collect_metrics import collect_metrics
from loopq.quantizers.loop_metric import n_gradient_prompts
from loopq.run.config import QuantConfig
from loopq.run.plan import Plan
from loopq.storage.journal import Journal


@dataclass(frozen=True)
class MetricOfDump:
    """Collector of loop metrics for `loopq.calibrate.hessian_dump.collect_hessians`.

    Parameters
    ----------
    n_prompts, n_draws : int
        Number of prompts for gradients. Each has `n_draws` label draws.
    steps : mapping of str to tuple of int
        Steps by parameter name. Other parameters take the steps of their Hessian.
    """

    job: Collection
    n_prompts: int
    n_draws: int
    steps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Collection, most: int | None, n_draws: int) -> MetricOfDump:
        """Take at most `most` of the prompts; all if it is None."""
        return cls(job, n_gradient_prompts(most, len(job.tokens.sequences)), n_draws)

    def collect(
        self, sums: HessianSet, input_groups: Sequence[str], work: Path
    ) -> dict[str, tuple[tuple[int, ...], GradientSums]]:
        """Return steps and sums of each parameter that reads one of the inputs."""
        config = QuantConfig.of(
            method="gptq-cd", metric="loop", metric_prompts=self.n_prompts, metric_draws=self.n_draws
        )
        job = self.job
        tasks = [
            dataclasses.replace(t, steps=self.steps.get(t.name, tuple(sums.steps[t.input_group])))
            for t in Plan.of(job.selection.parameters, job.selection.input_groups, config).tasks
            if t.input_group is not None and t.input_group in input_groups
        ]
        key = job.fingerprint([t.metric_key for t in tasks])
        metrics = collect_metrics(
            sums, job.system, job.tokens, tasks, job.selection.n_steps, job.execution, Journal(work, key)
        )
        over = {t.metric_name: t.steps for t in tasks}
        return {
            name: (over[name], GradientSums(m.left, m.right.astype(np.float64)))
            for name, m in metrics.items()
        }


def dump_for(plan: Plan, job: Collection, out: Path) -> HessianDump:
    """Plan the dump that a plan needs: the steps that some layer sums, and the loop metrics, if a layer has one.

    Steps are separate if a layer weights them, or does not sum all that it has.
    """
    tasks = [t for t in plan.tasks if t.input_group]
    steps = tuple(sorted({step for t in tasks for step in t.steps}))
    apart = any(
        t.step_weights != "sum" or list(t.steps) != [s for s in steps if s < t.parameter.invocations]
        for t in tasks
    )
    asked = {t.gradients for t in tasks if t.gradients}
    steps_of = {t.name: t.steps for t in tasks}
    metric = dataclasses.replace(MetricOfDump.of(job, *asked.pop()), steps=steps_of) if asked else None
    return HessianDump.of(job, out, steps=steps, per_step=apart, gradients=metric)
