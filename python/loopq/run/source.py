"""Sources of weights, Hessians and loop metrics of a quantization: a running model, or a dump."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.dump import Dump
from loopq.calibrate.hessians import Hessians
from loopq.calibrate.select import select, treat
from loopq.errors import ConfigError
from loopq.gradients.collect_metrics import collect_metrics
from loopq.layers.layer import QuantizedLayer
from loopq.models.depths import Depths
from loopq.quantizers.loop_metric import LoopMetric, n_gradient_prompts
from loopq.quantizers.task import Metrics, Task
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.memory import dumped_bytes, passes
from loopq.run.plan import Plan, outside, steps_by_input
from loopq.run.solver import Solver
from loopq.settings.execution import PLANNED, Execution, available_bytes, device_bytes, resident_bytes
from loopq.storage.journal import Journal, fingerprint
from loopq.storage.model_files import is_streamed
from loopq.storage.names import names_of
from loopq.storage.weights import ModelWeights
from loopq.systems.base import LoopedSystem

Layers = dict[str, QuantizedLayer]


class Source(ABC):
    """Data of a quantization, and the settings of its execution."""

    @property
    @abstractmethod
    def execution(self) -> Execution:
        """Threads, memory, progress and the work folder."""

    @property
    def device(self) -> str:
        """Device of the solvers, for methods that support it."""
        return "cpu"

    @property
    @abstractmethod
    def weights(self) -> ModelWeights:
        """Stored weights of the full-precision model."""

    @property
    @abstractmethod
    def side_files(self) -> Mapping[str, bytes]:
        """Config and tokenizer files of the model."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the facts for a checkpoint: system, depth, seed and calibration set."""

    @abstractmethod
    def key(self, plan: Plan) -> str:
        """Return the identity of the work: everything that determines a result."""

    @abstractmethod
    def plan(self, config: QuantConfig) -> Plan:
        """Plan the treatment of each layer.

        Raises
        ------
        ConfigError
            As in `Plan.of`, or the source does not support the settings.
        """

    def with_model(self) -> ModelSource | None:
        """Return the source itself if it can run the model. A dump cannot."""
        return None

    @abstractmethod
    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[Sequence[Task], Hessians, Metrics]]:
        """Divide tasks into parts and yield their Hessians and loop metrics. These are valid until the next part."""

    def journal(self, plan: Plan, name: str, *more: Any) -> Journal:
        """Return the journal for finished pieces of one kind. `more` is what else determines them."""
        folder = self.execution.folder(name)
        key = self.key(plan) if folder else ""
        return Journal(folder, fingerprint(key, *more) if folder and more else key)

    def solver(
        self, plan: Plan, hessians: Hessians, metrics: Metrics, journal: Journal | None = None
    ) -> Solver:
        """Return the solver of layers from Hessians."""
        threshold = plan.config.rank_threshold
        return Solver(
            self.weights,
            hessians,
            self.execution,
            threshold,
            metrics,
            journal or Journal(None),
            self.device,
        )


@dataclass(frozen=True)
class ModelSource(Source):
    """A model that runs rollouts.

    Parameters
    ----------
    job : Collection
        Model, calibration prompts, selected layers, and settings of execution.
    probe_seconds : float
        Seconds of a rollout of the first prompt.
    metrics : dict
        Collected loop metrics, by `Task.metric_key`.
    """

    job: Collection
    probe_seconds: float = 0.0
    metrics: Metrics = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        system: LoopedSystem,
        tokens: TokenSet,
        config: QuantConfig | None = None,
        *,
        n_steps: int | None = None,
        execution: Execution | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> ModelSource:
        """Choose the layers that `config` includes, and time a rollout of the first prompt."""
        config, execution = config or QuantConfig(), execution or Execution()
        began = time.monotonic()
        selection = select(
            system,
            tokens,
            n_steps=n_steps,
            include=config.include,
            exclude=config.exclude,
            # Only the inputs of tasks are summed. An override may calibrate layers that the run's method rounds.
            rounded=True,
            seed=execution.seed,
        )
        if config.outside is not None:
            # From here on, a table with another layout in files has the model's own name.
            outside(system, selection.parameters)
        if system.device.type != "cpu":
            # A device loads its kernels in the first rollout, so a second one is timed up to its result.
            began = time.monotonic()
            float(system.rollout(tokens.first(execution.seed), selection.n_steps).sum())
        seconds, free = time.monotonic() - began, available_bytes()
        if execution.memory is None and free is not None:
            # Mapped weights count as free, but each step reads them. On a GPU the sums of a pass lie there.
            free -= 0 if is_streamed(system.model) else resident_bytes(mapped=True)
            on_device = device_bytes(system.device)
            free = free if on_device is None else min(free, on_device)
            execution = dataclasses.replace(execution, memory=max(1, int(PLANNED * free)))
        return cls(Collection(system, tokens, selection, execution, files or {}), seconds)

    @property
    def execution(self) -> Execution:
        """As in `Source`."""
        return self.job.execution

    @property
    def device(self) -> str:
        """The model's device."""
        return str(self.job.system.device)

    def with_model(self) -> ModelSource:
        """As in `Source`."""
        return self

    @cached_property
    def weights(self) -> ModelWeights:
        """As in `Source`."""
        return ModelWeights.of_model(self.job.system.model)

    @property
    def side_files(self) -> Mapping[str, bytes]:
        """As in `Source`."""
        return self.job.side_files

    def facts(self) -> dict[str, Any]:
        """As in `Source`."""
        system = self.job.system
        named = names_of(system.model)
        odd = [p for p in self.job.selection.parameters if not p.name.endswith(".weight") and p.owners]
        modules = {p.name: named.module(system.model, p.owners[0]) for p in odd}
        return {
            "system": system.name,
            "n_steps": self.job.selection.n_steps,
            **({"depths": list(system.depths)} if isinstance(system, Depths) else {}),
            "seed": self.execution.seed,
            "calibration": self.job.tokens.describe(),
            **({"modules": modules} if modules else {}),
        }

    def key(self, plan: Plan) -> str:
        """As in `Source`."""
        return self.job.fingerprint(plan.config.to_json())

    def plan(self, config: QuantConfig) -> Plan:
        """As in `Source`."""
        return Plan.of(self.job.selection.parameters, self.job.selection.input_groups, config)

    def sums(
        self, plan: Plan, tasks: Sequence[Task] | None = None, *, per_step: bool | None = None
    ) -> HessianSet:
        """Return empty accumulators for all tasks or the given ones: one sum per input, or separate steps.

        By default the plan determines `per_step`.
        """
        chosen = plan if tasks is None else dataclasses.replace(plan, tasks=tuple(tasks))
        apart = chosen.per_step if per_step is None else per_step
        return HessianSet(self.job, steps_by_input(chosen.tasks), per_step=apart)

    def all_steps(
        self, plan: Plan, name: str | None = None, input_groups: Sequence[str] | None = None
    ) -> HessianSet:
        """Collect Hessians with separate steps, for use by several solves.

        Parameters
        ----------
        plan : Plan
            Layers with inputs to collect.
        name : str, optional
            Folder for saved sums within the work folder. Nothing is saved when absent.
        input_groups : sequence of str, optional
            Inputs to collect; all when absent.
        """
        sums = self.sums(plan, per_step=True)
        chosen = list(sums.steps) if input_groups is None else input_groups
        sums.run_pass(chosen, work=self.execution.folder(name) if name else None)
        return sums

    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[Sequence[Task], Hessians, Metrics]]:
        """Collect in the full-precision rollout, in as many passes as memory requires."""
        sums = self.sums(plan, tasks)
        unobserved = [t for t in tasks if t.input_group is None]
        for number, input_groups in enumerate(passes(self.job, plan.tasks, sums) or [[]]):
            if input_groups:
                sums.run_pass(input_groups, work=self.execution.folder(f"pass-{number}"))
            chosen = [t for t in tasks if t.input_group in input_groups]
            chosen += unobserved if number == 0 else []
            self.collect_metrics(plan, sums, chosen, f"metric-{number}")
            yield chosen, sums, self.metrics
            for input_group in input_groups:
                sums.drop(input_group)
            # These layers are not solved again.
            for t in chosen if not plan.config.inputs.runs_between else ():
                self.metrics.pop(t.metric_key, None)

    def collect_metrics(
        self, plan: Plan, hessians: Hessians, tasks: Sequence[Task], name: str = "metric"
    ) -> None:
        """Collect the missing loop metrics of some layers."""
        missing = [t for t in tasks if t.gradients and t.metric_key not in self.metrics]
        found = collect_metrics(
            hessians,
            self.job.system,
            self.job.tokens,
            missing,
            self.job.selection.n_steps,
            self.execution,
            # Another limit of memory divides the layers differently.
            self.journal(plan, name, [t.name for t in missing]),
        )
        self.metrics.update({t.metric_key: found.get(t.name) for t in missing})


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
        """As in `Source`."""
        return self.how

    @cached_property
    def weights(self) -> ModelWeights:
        """As in `Source`."""
        return self.dump.weights()

    @cached_property
    def side_files(self) -> Mapping[str, bytes]:
        """As in `Source`."""
        return self.dump.side_files()

    def facts(self) -> dict[str, Any]:
        """As in `Source`."""
        manifest = self.dump.manifest
        return {
            "system": manifest.system,
            "n_steps": manifest.n_steps,
            **({"depths": list(manifest.depths)} if manifest.depths else {}),
            "seed": manifest.seed,
            "calibration": manifest.calibration,
        }

    def key(self, plan: Plan) -> str:
        """As in `Source`."""
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

    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[Sequence[Task], Hessians, Metrics]]:
        """Yield everything as one part."""
        yield tasks, self.dump, self.metrics(tasks)

    def metrics(self, tasks: Sequence[Task]) -> Metrics:
        """Read the loop metric of every layer that has one.

        Raises
        ------
        DumpError
            The dump lacks the metric of a layer, or has it over other steps.
        ConfigError
            The settings have other numbers of prompts or draws than the dump.
        """
        found: Metrics = {}
        measured = {m.parameter for m in self.dump.manifest.metrics}
        for task in tasks:
            if task.gradients is None:
                continue
            if measured and task.parameter.routed_in and task.name not in measured:
                found[task.metric_key] = None
                continue
            metric = loop_metric(self.dump, task.name, task.steps)
            self._check_counts(task)
            found[task.metric_key] = metric
        return found

    def solve_bytes(self, plan: Plan) -> int:
        """Bytes of the solves: all loop metrics, and the sums and the solve of the layer that needs most."""
        manifest = self.dump.manifest
        apart = any(file.per_step for file in manifest.files)
        return sum(metric.n_bytes for metric in manifest.metrics) + dumped_bytes(plan.tasks, apart)

    def _check_counts(self, task: Task) -> None:
        assert task.gradients is not None
        manifest = self.dump.manifest
        first = manifest.metrics[0]
        prompts = n_gradient_prompts(task.gradients[0], int(manifest.calibration["n_prompts"]))
        asked = (prompts, task.gradients[1])
        if asked != (first.n_prompts, first.n_draws):
            raise ConfigError(
                f"layer {task.name}: a loop metric over {asked[0]} prompts and {asked[1]} draws is asked for; the "
                f"dump's is over {first.n_prompts} and {first.n_draws}: give --metric-prompts {first.n_prompts} "
                f"--metric-draws {first.n_draws}, or collect again"
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
