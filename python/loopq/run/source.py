"""Where weights, Hessians and loop metrics of a quantization come from: a model that is run, or a dump."""

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
from loopq.quantizers.loop_metric import LoopMetric, n_gradient_prompts
from loopq.quantizers.task import Metrics, Task
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.memory import passes
from loopq.run.plan import Plan, outside, steps_by_input
from loopq.run.solver import Solver
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal, fingerprint
from loopq.storage.model_files import is_streamed
from loopq.storage.names import names_of
from loopq.storage.weights import ModelWeights
from loopq.systems.base import LoopedSystem
from loopq.systems.depths import Depths

Layers = dict[str, QuantizedLayer]


class Source(ABC):
    """What a quantization reads, and how its work is carried out."""

    @property
    @abstractmethod
    def execution(self) -> Execution:
        """Threads, memory, progress and the work folder."""

    @property
    def device(self) -> str:
        """Where layers are solved, if their method can."""
        return "cpu"

    @property
    @abstractmethod
    def weights(self) -> ModelWeights:
        """Stored weights of the full-precision model."""

    @property
    @abstractmethod
    def side_files(self) -> Mapping[str, bytes]:
        """Config and tokenizer files that go with the model."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint records: system, depth, seed and calibration set."""

    @abstractmethod
    def key(self, plan: Plan) -> str:
        """Return the identity of the work: everything that fixes a result."""

    @abstractmethod
    def plan(self, config: QuantConfig) -> Plan:
        """Plan what happens to each layer.

        Raises
        ------
        ConfigError
            As of `Plan.of`, or settings that this source cannot serve.
        """

    def with_model(self) -> ModelSource | None:
        """Itself if it can run the model, which a dump cannot."""
        return None

    @abstractmethod
    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[Sequence[Task], Hessians, Metrics]]:
        """Divide tasks into parts and give the Hessians and loop metrics of each; they hold until the next is taken."""

    def journal(self, plan: Plan, name: str) -> Journal:
        """Where finished pieces of one kind are saved."""
        folder = self.execution.folder(name)
        return Journal(folder, self.key(plan) if folder else "")

    def solver(
        self, plan: Plan, hessians: Hessians, metrics: Metrics, journal: Journal | None = None
    ) -> Solver:
        """What solves layers from Hessians."""
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
    """A model whose rollouts are run.

    Parameters
    ----------
    job : Collection
        Model, calibration prompts, selected layers, and how work is carried out.
    probe_seconds : float
        Seconds that a rollout of the first prompt took.
    metrics : dict
        Loop metrics that were collected, by `Task.metric_key`.
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
            # Only what a task asks for is summed: an override may calibrate what the run's method rounds.
            rounded=True,
            seed=execution.seed,
        )
        if config.outside is not None:
            # A table that files keep in another layout has the model's own name from here on.
            outside(system, selection.parameters)
        if system.device.type != "cpu":
            # A device loads its kernels in the first rollout: another is timed, and its result waited for.
            began = time.monotonic()
            float(system.rollout(tokens.first(execution.seed), selection.n_steps).sum())
        seconds = time.monotonic() - began
        return cls(Collection(system, tokens, selection, execution, files or {}), seconds)

    @property
    def execution(self) -> Execution:
        """As of `Source`."""
        return self.job.execution

    @property
    def device(self) -> str:
        """The model's."""
        return str(self.job.system.device)

    def with_model(self) -> ModelSource:
        """As of `Source`."""
        return self

    @cached_property
    def weights(self) -> ModelWeights:
        """As of `Source`."""
        return ModelWeights.of_model(self.job.system.model)

    @property
    def side_files(self) -> Mapping[str, bytes]:
        """As of `Source`."""
        return self.job.side_files

    def facts(self) -> dict[str, Any]:
        """As of `Source`."""
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
        """As of `Source`."""
        return self.job.fingerprint(plan.config.to_json())

    def plan(self, config: QuantConfig) -> Plan:
        """As of `Source`."""
        plan = Plan.of(self.job.selection.parameters, self.job.selection.input_groups, config)
        if is_streamed(self.job.system.model) and config.fit:
            raise ConfigError(
                "the model's weights are read layer by layer: fit needs them in memory; give --bits and --layer, "
                "or take a machine with more memory"
            )
        return plan

    def sums(
        self, plan: Plan, tasks: Sequence[Task] | None = None, *, per_step: bool | None = None
    ) -> HessianSet:
        """Empty accumulators of all tasks or of those given: one sum for each input, or each step apart.

        `per_step` is as the plan needs it when absent.
        """
        chosen = plan if tasks is None else dataclasses.replace(plan, tasks=tuple(tasks))
        apart = chosen.per_step if per_step is None else per_step
        return HessianSet(self.job, steps_by_input(chosen.tasks), per_step=apart)

    def all_steps(
        self, plan: Plan, name: str | None = None, input_groups: Sequence[str] | None = None
    ) -> HessianSet:
        """Collect Hessians with each step apart, to be used by several solves.

        Parameters
        ----------
        plan : Plan
            Layers whose inputs are collected.
        name : str, optional
            Folder within the work folder where sums are saved; they are not saved when absent.
        input_groups : sequence of str, optional
            Inputs to collect; all when absent.
        """
        sums = self.sums(plan, per_step=True)
        chosen = list(sums.steps) if input_groups is None else input_groups
        sums.run_pass(chosen, work=self.execution.folder(name) if name else None)
        return sums

    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[Sequence[Task], Hessians, Metrics]]:
        """Collect in the full-precision rollout, in as many passes as memory asks for."""
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
            # Nothing solves these layers again.
            for t in chosen if not plan.config.inputs.runs_between else ():
                self.metrics.pop(t.metric_key, None)

    def collect_metrics(
        self, plan: Plan, hessians: Hessians, tasks: Sequence[Task], name: str = "metric"
    ) -> None:
        """Collect the loop metrics that some layers ask for and that are not there yet."""
        missing = [t for t in tasks if t.gradients and t.metric_key not in self.metrics]
        found = collect_metrics(
            hessians,
            self.job.system,
            self.job.tokens,
            missing,
            self.job.selection.n_steps,
            self.execution,
            self.journal(plan, name),
        )
        self.metrics.update({t.metric_key: found.get(t.name) for t in missing})


@dataclass(frozen=True)
class DumpSource(Source):
    """A calibration dump: needs neither the model nor torch.

    Parameters
    ----------
    dump : Dump
        Rows or Hessians, perhaps with loop metrics, and the model's weights.
    how : Execution
        How work is carried out.
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
        """As of `Source`."""
        return self.how

    @cached_property
    def weights(self) -> ModelWeights:
        """As of `Source`."""
        return self.dump.weights()

    @cached_property
    def side_files(self) -> Mapping[str, bytes]:
        """As of `Source`."""
        return self.dump.side_files()

    def facts(self) -> dict[str, Any]:
        """As of `Source`."""
        manifest = self.dump.manifest
        return {
            "system": manifest.system,
            "n_steps": manifest.n_steps,
            **({"depths": list(manifest.depths)} if manifest.depths else {}),
            "seed": manifest.seed,
            "calibration": manifest.calibration,
        }

    def key(self, plan: Plan) -> str:
        """As of `Source`."""
        m = self.dump.manifest
        return fingerprint(plan.config.to_json(), m.model, m.rows, m.files, m.metrics)

    def plan(self, config: QuantConfig) -> Plan:
        """As of `Source`; metric "auto" becomes what the dump holds."""
        refuse_rollouts(config, "a dump", "use `quantize`")
        manifest = self.dump.manifest
        if manifest.metrics:
            first = manifest.metrics[0]
            config = config.with_metric("loop", metric_prompts=first.n_prompts, metric_draws=first.n_draws)
        else:
            config = config.with_metric("inputs")
        # What a dump was told to leave out it did not observe; include cannot bring it back.
        return Plan.of(treat(manifest.parameters, (), config.exclude), manifest.input_groups, config)

    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[Sequence[Task], Hessians, Metrics]]:
        """Everything is there: one part."""
        yield tasks, self.dump, self.metrics(tasks)

    def metrics(self, tasks: Sequence[Task]) -> Metrics:
        """Read the loop metric of every layer that asks for one.

        Raises
        ------
        DumpError
            The dump holds none for a layer, or over other steps.
        ConfigError
            Other counts of prompts or draws are asked for than the dump's.
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
        The dump holds none for the layer, or over other steps.
    """
    sums, first = dump.gradient_sums(name, steps), dump.manifest.metrics[0]
    return LoopMetric(sums.left, sums.right, first.n_prompts * first.n_draws)


def refuse_rollouts(config: QuantConfig, who: str, instead: str) -> None:
    """Refuse settings that run the model once more after the Hessians are collected.

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
