"""A calibration dump as a source of weights, Hessians and loop metrics. It needs no torch."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from loopq.calibrate.dump import Dump, MetricFile, StoredSums
from loopq.calibrate.select import treat
from loopq.errors import ConfigError
from loopq.quantizers.loop_metric import LoopMetric, n_gradient_prompts
from loopq.quantizers.task import MetricKey, Metrics, Task
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.memory import dumped_bytes
from loopq.run.plan import Plan
from loopq.run.source import Part, Source
from loopq.settings.execution import Execution, at_most
from loopq.storage.journal import fingerprint
from loopq.storage.schema import Object
from loopq.storage.weights import ModelWeights


@dataclass(frozen=True)
class DumpSource(Source):
    """A calibration dump. It needs neither the model nor torch.

    Parameters
    ----------
    dump : Dump
        Rows or Hessians, perhaps with loop metrics, and the model's weights.
    how : Execution
        Settings of execution.
    """

    dump: Dump
    how: Execution

    @classmethod
    def open(cls, folder: Path, execution: Execution) -> DumpSource:
        """Open a dump.

        Raises
        ------
        DumpError
            It is truncated or altered.
        """
        return cls(Dump(folder, threads=execution.threads), execution)

    @property
    def execution(self) -> Execution:
        return self.how

    @cached_property
    def weights(self) -> ModelWeights:
        return self.dump.weights()

    @cached_property
    def side_files(self) -> Mapping[str, bytes]:
        return self.dump.side_files()

    def facts(self) -> Object:
        manifest = self.dump.manifest
        return {
            "system": manifest.system,
            "n_steps": manifest.n_steps,
            **({"depths": list(manifest.depths)} if manifest.depths else {}),
            "seed": manifest.seed,
            "calibration": manifest.calibration,
        }

    def key(self, plan: Plan) -> str:
        m = self.dump.manifest
        return fingerprint(plan.config.to_json(), m.model, m.rows, m.files, m.metrics)

    def plan(self, config: QuantConfig) -> Plan:
        """As in `Source`. Metric "auto" becomes the metric of the dump."""
        refuse_rollouts(config, "a dump", "use `quantize`")
        manifest = self.dump.manifest
        if manifest.metrics:
            first = manifest.metrics[0]
            config = config.with_metric("loop", metric_prompts=first.n_prompts, metric_draws=first.n_draws)
        else:
            config = config.with_metric("inputs")
        # The dump did not observe excluded layers, so include cannot restore them.
        return Plan.of(treat(manifest.parameters, (), config.exclude), manifest.input_groups, config)

    def prepare(self, plan: Plan) -> Plan:
        """As in `Source`. A dump decides nothing.

        The solves hold one loop metric, and the sums and the solve of the layer that needs most.
        """
        manifest = self.dump.manifest
        apart = any(file.per_step for file in manifest.files)
        need = max((metric.n_bytes for metric in manifest.metrics), default=0) + dumped_bytes(
            plan.tasks, apart
        )
        summary = f"{len(plan.tasks)} layers, {manifest.n_steps} steps"
        self.execution.progress.note(f"{summary}: {at_most(need)}")
        return plan

    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Generator[Part, None, None]:
        """Yield everything as one part."""
        yield tasks, self.dump, self.metrics(tasks)

    def metrics(self, tasks: Sequence[Task]) -> StoredMetrics:
        """Return the loop metrics of the layers, each read on access.

        Raises
        ------
        DumpError
            The dump lacks the metric of a layer, or has it over other steps.
        ConfigError
            The settings have other numbers of prompts or draws than the dump.
        """
        metrics = StoredMetrics.of(self.dump.sums, tasks)
        for task in metrics.tasks.values():
            # Experts without gradients have no metric. A dump without any has none of gradients.
            if metrics.has(task) or not (self.dump.manifest.metrics and task.parameter.routed_in):
                self._check_counts(task, self.dump.sums.metric_file(task.metric_name, task.steps))
        return metrics

    def _check_counts(self, task: Task, entry: MetricFile) -> None:
        assert task.gradients is not None
        prompts = n_gradient_prompts(task.gradients[0], int(self.dump.manifest.calibration["n_prompts"]))
        asked = (prompts, task.gradients[1])
        if asked != (entry.n_prompts, entry.n_draws):
            raise ConfigError(
                f"layer {task.name}: a loop metric over {asked[0]} prompts and {asked[1]} draws is asked for; the "
                f"dump's is over {entry.n_prompts} and {entry.n_draws}: give --set metric_prompts={entry.n_prompts} "
                f"--set metric_draws={entry.n_draws}, or collect again"
            )


@dataclass(frozen=True)
class StoredMetrics(Mapping[MetricKey, LoopMetric | None]):
    """Loop metrics in files, each read on access; None for experts that receive no gradient.

    Parameters
    ----------
    sums : StoredSums
        The files.
    tasks : mapping of MetricKey to Task
        A layer of each metric.
    known : Metrics
        Metrics in memory, which need no file.
    """

    sums: StoredSums
    tasks: Mapping[MetricKey, Task]
    known: Metrics = field(default_factory=dict)

    @classmethod
    def of(cls, sums: StoredSums, tasks: Iterable[Task], known: Metrics | None = None) -> StoredMetrics:
        """Return the metrics of those layers that have one."""
        return cls(sums, {t.metric_key: t for t in tasks if t.gradients}, known or {})

    def has(self, task: Task) -> bool:
        """Whether there is a file of a layer's metric."""
        return any(m.parameter == task.metric_name for m in self.sums.metrics)

    def __getitem__(self, key: MetricKey) -> LoopMetric | None:
        task = self.tasks[key]
        if key in self.known:
            return self.known[key]
        if task.parameter.routed_in and not self.has(task):
            return None
        return loop_metric(self.sums, task.metric_name, task.steps)

    def __contains__(self, key: object) -> bool:
        return key in self.tasks

    def __iter__(self) -> Iterator[MetricKey]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


def loop_metric(sums: StoredSums, name: str, steps: Sequence[int]) -> LoopMetric:
    """Read the loop metric of a layer.

    Raises
    ------
    DumpError
        The files lack the metric of the layer, or have it over other steps.
    """
    entry = sums.metric_file(name, steps)
    gradients = sums.gradient_sums(entry)
    return LoopMetric(gradients.left, gradients.right, entry.n_prompts * entry.n_draws)


def refuse_rollouts(config: QuantConfig, who: str, instead: str) -> None:
    """Refuse settings that run the model again after the Hessians are collected.

    Raises
    ------
    ConfigError
        The message says what `who` cannot do, and what to do instead.
    """
    if config.inputs.runs_between:
        raise ConfigError(
            f"inputs {config.inputs.name!r} run the model between layers, which {who} cannot: {instead}"
        )
    refuse_outside(config, f"{who} cannot", instead)
    if config.fit is not None:
        raise ConfigError(f"fit runs the model, which {who} cannot: {instead}")
