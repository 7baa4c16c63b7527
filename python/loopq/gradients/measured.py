"""The loop metrics of a collection, for the files beside its Hessians."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopq.calibrate.hessian_dump import Measured
from loopq.calibrate.hessians import Hessians
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.sums_file import GradientSums
from loopq.gradients.collect_metrics import collect_metrics
from loopq.quantizers.loop_metric import n_gradient_prompts
from loopq.quantizers.task import Task
from loopq.storage.journal import Journal


@dataclass(frozen=True)
class LoopMetrics:
    """Collector of loop metrics (`loopq.calibrate.hessian_dump.Gradients`).

    Parameters
    ----------
    job : Collection
        The model and its prompts.
    tasks : tuple of Task
        Layers with a loop metric. Those of one pass have the same prompts and draws.
    """

    job: Collection
    tasks: tuple[Task, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """Number of prompts for gradients, and label draws for each of them."""
        return self._counts(self.tasks)

    def _counts(self, tasks: Sequence[Task]) -> tuple[int, int]:
        most, n_draws = next((t.gradients for t in tasks if t.gradients), (0, 0))
        return n_gradient_prompts(most, len(self.job.tokens.sequences)), n_draws

    def collect(
        self, hessians: Hessians, input_groups: Sequence[str], work: Path | None
    ) -> Iterator[Measured]:
        """Yield the metric of each parameter that reads one of the inputs."""
        job, wanted = self.job, set(input_groups)
        tasks = [t for t in self.tasks if t.input_group in wanted]
        # Without a folder nothing is saved. A key reads all weights.
        key = job.fingerprint([t.metric_key for t in tasks]) if work else ""
        metrics = collect_metrics(
            hessians, job.system, job.tokens, tasks, job.selection.n_steps, job.execution, Journal(work, key)
        )
        steps, counts = {t.metric_name: t.steps for t in tasks}, self._counts(tasks)
        for name in list(metrics):
            metric = metrics.pop(name)
            yield Measured(
                name, steps[name], GradientSums(metric.left, metric.right.astype(np.float64)), *counts
            )
