"""One quantization: what is collected, what is asked of each layer, and how both come together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessians import Hessians
from loopq.calibrate.select import select
from loopq.gradients.collect_metrics import collect_metrics
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers.task import Metrics, Task
from loopq.run.config import QuantConfig
from loopq.run.plan import plan, steps_by_input
from loopq.run.solver import Solver
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from loopq.storage.weights import ModelWeights
from loopq.systems.base import LoopedSystem

Layers = dict[str, QuantizedLayer]


@dataclass(frozen=True)
class Run:
    """One quantization.

    Parameters
    ----------
    job : Collection
        What is collected, and how work is carried out.
    config : QuantConfig
        What is asked for.
    probe_seconds : float
        Seconds that a rollout of the first prompt took.
    metrics : Metrics
        Loop metrics that were collected; runs of the same collection share them.
    """

    job: Collection
    config: QuantConfig
    probe_seconds: float = 0.0
    metrics: Metrics = field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        system: LoopedSystem,
        tokens: TokenSet,
        config: QuantConfig | None = None,
        *,
        n_steps: int | None = None,
        execution: Execution | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Run:
        """Choose the layers and time a rollout of the first prompt."""
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
        seconds = time.monotonic() - began
        return cls(Collection(system, tokens, selection, execution, files or {}), config, seconds)

    @property
    def execution(self) -> Execution:
        """How work is carried out."""
        return self.job.execution

    @cached_property
    def tasks(self) -> list[Task]:
        """Layers to quantize."""
        return plan(self.job.selection.parameters, self.job.selection.input_groups, self.config)

    @cached_property
    def weights(self) -> ModelWeights:
        """Stored weights of the full-precision model."""
        return ModelWeights.of_model(self.job.system.model)

    def with_config(self, config: QuantConfig) -> Run:
        """The same collection with other settings."""
        return dataclasses.replace(self, config=config)

    def key(self) -> str:
        """Identity of the work: everything that fixes a result of this run."""
        return self.job.fingerprint(self.config.to_json())

    def journal(self, name: str) -> Journal:
        """Where pieces of this run of one kind are saved."""
        folder = self.execution.folder(name)
        return Journal(folder, self.key() if folder else "")

    def sums(self, *, per_step: bool | None = None, tasks: Sequence[Task] | None = None) -> HessianSet:
        """Empty accumulators: one sum for each input, or each step apart where layers choose or weigh differently.

        They are of all tasks, or of those given.
        """
        tasks = self.tasks if tasks is None else tasks
        steps = steps_by_input(tasks)
        if per_step is None:
            per_step = any(
                t.input_group and (list(t.steps) != steps[t.input_group] or t.step_weights != "sum")
                for t in tasks
            )
        return HessianSet(self.job, steps, per_step=per_step)

    def all_steps(self, name: str | None = None, input_groups: Sequence[str] | None = None) -> HessianSet:
        """Collect Hessians with each step apart, to be used by several solves.

        Parameters
        ----------
        name : str, optional
            Folder within the work folder where sums are saved; they are not saved when absent.
        input_groups : sequence of str, optional
            Inputs to collect; all when absent.
        """
        sums = self.sums(per_step=True)
        sums.run_pass(
            list(sums.steps) if input_groups is None else input_groups,
            work=self.execution.folder(name) if name else None,
        )
        return sums

    def solver(self, hessians: Hessians, journal: Journal | None = None) -> Solver:
        """What solves layers of this run from Hessians."""
        return Solver(
            self.weights,
            hessians,
            self.execution,
            self.config.rank_threshold,
            self.metrics,
            journal or Journal(None),
        )

    def solve_from(self, hessians: Hessians, config: QuantConfig | None = None) -> Layers:
        """Solve from Hessians that are there; loop metrics are collected where they are missing.

        Parameters
        ----------
        hessians : Hessians
            As of `all_steps`. Inputs other than those of the full-precision rollout are collected besides.
        config : QuantConfig, optional
            Other settings than the run's own.
        """
        run = self if config is None else self.with_config(config)
        run.collect_metrics(hessians, run.tasks)
        if run.config.inputs.name != "open":
            return run.config.inputs.solve(run)
        return run.solver(hessians, run.journal("layers")).run(run.tasks)

    def collect_metrics(self, hessians: Hessians, tasks: Sequence[Task], name: str = "metric") -> None:
        """Collect the loop metrics that some layers ask for and that are not there yet."""
        missing = [t for t in tasks if t.gradients and t.metric_key not in self.metrics]
        found = collect_metrics(
            hessians,
            self.job.system,
            self.job.tokens,
            missing,
            self.job.selection.n_steps,
            self.execution,
            self.journal(name),
        )
        self.metrics.update({t.metric_key: found.get(t.name) for t in missing})

    def work(self, name: str) -> Path | None:
        """A folder within the work folder."""
        return self.execution.folder(name)
