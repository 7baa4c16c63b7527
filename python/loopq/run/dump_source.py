"""A calibration dump as a source of weights, Hessians and loop metrics. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from loopq.calibrate.dump import Dump
from loopq.calibrate.hessians import Hessians
from loopq.calibrate.select import treat
from loopq.errors import ConfigError
from loopq.quantizers.loop_metric import LoopMetric, n_gradient_prompts
from loopq.quantizers.task import Metrics, Task
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.memory import dumped_bytes
from loopq.run.plan import Plan
from loopq.run.source import Source
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

        The solves hold all loop metrics, and the sums and the solve of the layer that needs most.
        """
        manifest = self.dump.manifest
        apart = any(file.per_step for file in manifest.files)
        need = sum(metric.n_bytes for metric in manifest.metrics) + dumped_bytes(plan.tasks, apart)
        summary = f"{len(plan.tasks)} layers, {manifest.n_steps} steps"
        self.execution.progress.note(f"{summary}: {at_most(need)}")
        return plan

    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[Sequence[Task], Hessians, Metrics]]:
        """Yield everything as one part."""
        yield tasks, self.dump, self.metrics(tasks)

    def metrics(self, tasks: Sequence[Task]) -> Metrics:
        """Read the loop metric of every layer that has one, as `loop_metric` does.

        Raises
        ------
        ConfigError
            The settings have other numbers of prompts or draws than the dump.
        """
        metrics: Metrics = {}
        measured = {m.parameter for m in self.dump.manifest.metrics}
        for task in tasks:
            if task.gradients is None:
                continue
            if measured and task.parameter.routed_in and task.metric_name not in measured:
                metrics[task.metric_key] = None
                continue
            metrics[task.metric_key] = loop_metric(self.dump, task.metric_name, task.steps)
            self._check_counts(task)
        return metrics

    def _check_counts(self, task: Task) -> None:
        assert task.gradients is not None
        manifest = self.dump.manifest
        first = manifest.metrics[0]
        prompts = n_gradient_prompts(task.gradients[0], int(manifest.calibration["n_prompts"]))
        asked = (prompts, task.gradients[1])
        if asked != (first.n_prompts, first.n_draws):
            raise ConfigError(
                f"layer {task.name}: a loop metric over {asked[0]} prompts and {asked[1]} draws is asked for; the "
                f"dump's is over {first.n_prompts} and {first.n_draws}: give --set metric_prompts={first.n_prompts} "
                f"--set metric_draws={first.n_draws}, or collect again"
            )


def loop_metric(dump: Dump, name: str, steps: Sequence[int]) -> LoopMetric:
    """Read the loop metric of a layer from a dump.

    Raises
    ------
    DumpError
        The dump lacks the metric of the layer, or has it over other steps.
    """
    sums, first = dump.gradient_sums(name, steps), dump.manifest.metrics[0]
    return LoopMetric(sums.left, sums.right, first.n_prompts * first.n_draws)


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
