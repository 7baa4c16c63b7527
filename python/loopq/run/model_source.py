"""A running model as a source of weights, Hessians and loop metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from loopq.calibrate.collect import collected
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessian_dump import HessianDump
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.hessians import Hessians
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select, select_shape
from loopq.gradients.collect_metrics import collect_metrics
from loopq.gradients.measured import LoopMetrics
from loopq.models.depths import Depths
from loopq.quantizers.loop_metric import LoopMetric
from loopq.quantizers.task import MetricKey, Task
from loopq.run.auto import choose_metric
from loopq.run.config import QuantConfig
from loopq.run.dump_source import DumpSource, StoredMetrics
from loopq.run.estimate import Estimate, estimate, timed_gradient, timed_rollout
from loopq.run.memory import passes
from loopq.run.outside import outside, plan_model, tell_left, tell_share
from loopq.run.plan import Plan
from loopq.run.ranks import Ranks, collect_hessians
from loopq.run.source import Part, Source
from loopq.settings.execution import PLANNED, Execution, available_bytes, device_bytes, resident_bytes
from loopq.storage.model_files import is_streamed
from loopq.storage.names import names_of
from loopq.storage.schema import Object
from loopq.storage.weights import ModelWeights
from loopq.systems.base import LoopedSystem


@dataclass(frozen=True)
class ModelSource(Source):
    """A model that runs rollouts.

    Parameters
    ----------
    job : Collection
        Model, calibration prompts, selected layers, and settings of execution.
    token_seconds : float
        Seconds of a rollout for each token. Zero for a model without values.
    metrics : dict
        Loop metrics in memory by `Task.metric_key`, for several solves. `parts` does not collect them again.
    """

    job: Collection
    token_seconds: float = 0.0
    metrics: dict[MetricKey, LoopMetric | None] = field(default_factory=dict)

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
        ).pooled(tokens.n_tokens)
        if config.outside is not None:
            # From here on, a table with another layout in files has the model's own name.
            outside(system, selection.parameters)
        job = Collection(system, tokens, selection, execution, files or {})
        # The first rollout also loads kernels and libraries.
        seconds, free = timed_rollout(job, time.monotonic() - began), available_bytes()
        if execution.memory is None and free is not None:
            # Mapped weights count as free, but each step reads them. On a GPU the sums of a pass lie there.
            free -= 0 if is_streamed(system.model) else resident_bytes(mapped=True)
            on_device = device_bytes(system.device)
            free = free if on_device is None else min(free, on_device)
            execution = dataclasses.replace(execution, memory=max(1, int(PLANNED * free)))
        return cls(dataclasses.replace(job, execution=execution), seconds)

    @classmethod
    def of_shape(
        cls,
        system: LoopedSystem,
        tokens: TokenSet,
        config: QuantConfig,
        *,
        n_steps: int | None = None,
        execution: Execution,
    ) -> ModelSource:
        """Choose the layers of a model without values. It plans and estimates, and cannot run."""
        selection = select_shape(system, n_steps=n_steps, include=config.include, exclude=config.exclude)
        return cls(Collection(system, tokens, selection.pooled(tokens.n_tokens), execution))

    @property
    def execution(self) -> Execution:
        return self.job.execution

    @property
    def device(self) -> str:
        """The model's device."""
        return str(self.job.system.device)

    @cached_property
    def weights(self) -> ModelWeights:
        return ModelWeights.of_model(self.job.system.model)

    @property
    def side_files(self) -> Mapping[str, bytes]:
        return self.job.side_files

    def facts(self) -> Object:
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
        return self.job.key(plan.config.to_json())

    def plan(self, config: QuantConfig) -> Plan:
        return plan_model(config, self.job)

    def prepare(self, plan: Plan) -> Plan:
        """As in `Source`. Metric "auto" becomes "loop" if there are gradients."""
        plan = choose_metric(plan, self.job)
        summary = f"{len(plan.tasks)} layers, {self.job.selection.n_steps} steps"
        self.execution.progress.note(f"{summary}: {self.estimate(plan)}")
        for method in sorted({t.config.method.name for t in plan.tasks if t.config.method.folds}):
            self.execution.progress.note(f"{method}: layers of one input share a transform")
        tell_share(plan, self.job)
        tell_left(plan, self.job, self.weights)
        return plan

    def divisible(self, plan: Plan, folder: Path, ranks: Ranks | None) -> Source:
        """As in `Source`. The ranks collect a dump."""
        assert ranks is not None
        out = folder / f"dump-{self.key(plan)[:16]}"
        if not collected(out):
            collect_hessians(ranks, self.dump(plan, plan.tasks, out, out / "work"))
        return DumpSource.open(out, self.execution)

    def dump(self, plan: Plan, tasks: Sequence[Task], out: Path, work: Path | None) -> HessianDump:
        """Plan files in `out` with the sums that some tasks need, in as many passes as memory requires."""
        sums = self.sums(plan, tasks)
        measured = tuple(t for t in tasks if t.gradients and t.metric_key not in self.metrics)
        gradients = LoopMetrics(self.job, measured) if measured else None
        return HessianDump(sums, passes(self.job, plan.tasks, sums), out, work, gradients)

    def estimate(self, plan: Plan) -> Estimate:
        """Estimate memory and time of a plan. A model with values runs one gradient for it."""
        gradient = timed_gradient(self.job, plan.tasks) if self.token_seconds else 0.0
        return estimate(plan, self.job, self.token_seconds, gradient)

    def sums(
        self, plan: Plan, tasks: Sequence[Task] | None = None, *, per_step: bool | None = None
    ) -> HessianSet:
        """Return empty accumulators for all tasks or the given ones: one sum per input, or separate steps.

        By default the plan determines `per_step`.
        """
        chosen = plan if tasks is None else dataclasses.replace(plan, tasks=tuple(tasks))
        return chosen.sums(self.job, per_step=per_step)

    def all_steps(self, plan: Plan, name: str | None = None) -> HessianSet:
        """Collect Hessians with separate steps, for use by several solves.

        Parameters
        ----------
        plan : Plan
            Layers with inputs to collect.
        name : str, optional
            Folder for saved sums within the work folder. Nothing is saved when absent.
        """
        sums = self.sums(plan, per_step=True)
        sums.run_pass(list(sums.steps), work=self.execution.folder(name) if name else None)
        return sums

    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Generator[Part, None, None]:
        """Collect in the full-precision rollout. The files of a pass are removed before the next."""
        unread = [t for t in tasks if t.input_group is None]
        with self._files() as (out, work):
            dump = self.dump(plan, tasks, out, work)
            if not dump.passes:
                yield unread, dump.sums, self.metrics
            for number, part in enumerate(dump.parts()):
                chosen = [t for t in tasks if t.input_group in part.rows]
                metrics = StoredMetrics.of(part, chosen, self.metrics)
                yield [*chosen, *(unread if number == 0 else ())], part, metrics
                part.remove()

    @contextlib.contextmanager
    def _files(self) -> Iterator[tuple[Path, Path | None]]:
        """Provide an empty folder for sums, which is removed, and one for unfinished work, which stays."""
        folder = self.execution.folder("sums")
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="loopq-") as temporary:
                yield Path(temporary), None
            return
        # A killed run left its files.
        shutil.rmtree(folder, ignore_errors=True)
        try:
            yield folder, self.execution.folder("passes")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def collect_metrics(
        self, plan: Plan, hessians: Hessians, tasks: Sequence[Task], name: str = "metric"
    ) -> None:
        """Collect the missing loop metrics of some layers."""
        missing = [t for t in tasks if t.gradients and t.metric_key not in self.metrics]
        metrics = collect_metrics(
            hessians,
            self.job.system,
            self.job.tokens,
            missing,
            self.job.selection.n_steps,
            self.execution,
            # Another limit of memory divides the layers differently.
            self.journal(plan, name, [t.name for t in missing]),
        )
        self.metrics.update({t.metric_key: metrics.get(t.metric_name) for t in missing})
