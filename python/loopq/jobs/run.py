"""One quantization: collect, solve, and what it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import loopq._native as native
from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.select import select
from loopq.checkpoint.layer import QuantizedLayer
from loopq.checkpoint.model_files import model_tensors
from loopq.config import QuantConfig
from loopq.errors import ConfigError
from loopq.progress import Progress
from loopq.quantizers.metric import LoopMetric
from loopq.quantizers.sequential import Sequential, recollected
from loopq.quantizers.solve import LayerStore, Solver, Source, Task, tasks_of
from loopq.systems.base import SharedParameter
from loopq.tune.metric import MetricCost, metric_cost

if TYPE_CHECKING:
    from loopq.systems.load import LoadedModel


@dataclass(frozen=True)
class Estimate:
    """What a run will take, told before it starts.

    Parameters
    ----------
    memory : int
        Bytes of Hessian accumulators held at once, and of the largest layer's solve on top.
    seconds : float
        Everything together, from rates measured on this machine a moment ago.
    n_passes : int
        Times the calibration set is run: more than one where a memory limit or the kind of inputs asks for it.
    metric : MetricCost
        What the loop metric takes; all zero where no layer has one.
    metric_seconds : float
        Its share of `seconds`.
    """

    memory: int
    seconds: float
    n_passes: int
    metric: MetricCost
    metric_seconds: float

    def __str__(self) -> str:
        """One line for a person."""
        passes = f", {self.n_passes} passes over the calibration set" if self.n_passes > 1 else ""
        text = f"about {self.memory / 2**20:.0f} MiB for Hessians and {duration(self.seconds)}{passes}"
        if not self.metric.n_gradients:
            return text
        return (
            f"{text}; of this {self.metric.n_gradients} gradients for the loop metric: "
            f"{self.metric.memory / 2**20:.0f} MiB more and {duration(self.metric_seconds)}"
        )


def duration(seconds: float) -> str:
    """A time for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def side_files(loaded: LoadedModel) -> dict[str, bytes]:
    """Read the config and tokenizer files that go with a model's weights."""
    return {path.name: path.read_bytes() for path in loaded.config_files}


@dataclass
class Run:
    """One `quantize`: the job, its tasks, and how they are carried out."""

    job: Collection
    tasks: list[Task]
    config: QuantConfig
    threads: int
    probe_seconds: float
    _metrics: dict[str, LoopMetric] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        loaded: LoadedModel,
        tokens: TokenSet,
        config: QuantConfig,
        n_steps: int | None,
        batch_size: int,
        seed: int,
        threads: int,
    ) -> Run:
        began = time.monotonic()
        selection = select(
            loaded.system, tokens, n_steps=n_steps, include=config.include, exclude=config.exclude, seed=seed
        )
        probe = time.monotonic() - began
        tasks, _ = tasks_of(selection.parameters, selection.leaders, config)
        job = Collection(loaded.system, tokens, selection, batch_size, seed, side_files(loaded))
        return cls(job, tasks, config, threads, probe)

    def asking(self, config: QuantConfig) -> Run:
        """The same job by other settings."""
        selection = self.job.selection
        tasks, _ = tasks_of(selection.parameters, selection.leaders, config)
        return Run(self.job, tasks, config, self.threads, self.probe_seconds)

    def steps(self) -> dict[str, list[int]]:
        """Steps that each input group must keep: the union over its layers."""
        steps: dict[str, set[int]] = {}
        for task in self.tasks:
            if task.leader:
                steps.setdefault(task.leader, set()).update(task.steps)
        return {leader: sorted(s) for leader, s in steps.items()}

    def hessians(self) -> HessianSet:
        """Empty accumulators: one sum for each group, or each step apart where layers choose differently."""
        steps = self.steps()
        apart = any(
            t.leader and (list(t.steps) != steps[t.leader] or t.config.step_weights != "sum")
            for t in self.tasks
        )
        return HessianSet(self.job, steps, per_step=apart, threads=self.threads)

    def all_steps(self, progress: Progress) -> HessianSet:
        """Collect the Hessians of every layer, each step apart, to be used by several solves."""
        sums = HessianSet(self.job, self.steps(), per_step=True, threads=self.threads)
        sums.run_pass(list(sums.steps), progress=progress)
        return sums

    def solve_from(self, sums: Source, config: QuantConfig) -> dict[str, QuantizedLayer]:
        """Solve open loop from Hessians that are there, by other settings."""
        tensors, ties = model_tensors(self.job.system.model)
        selection = self.job.selection
        tasks, _ = tasks_of(selection.parameters, selection.leaders, config)
        solver = Solver(
            lambda p: tensors[ties.get(p.name, p.name)], sums, config.rank_threshold, self.threads
        )
        return solver.run(tasks)

    def estimate(self, memory: int | None) -> Estimate:
        """Estimate memory and time from the probe rollout and a short measurement of the core."""
        sums = self.hessians()
        passes = sums.passes(memory)
        held = max((sum(sums.n_bytes(x) for x in p) for p in passes), default=0)
        widest = max((t.parameter.in_features for t in self.tasks), default=0)
        rate = _core_rate(self.threads)
        tokens = self.job.tokens
        once = self.probe_seconds * tokens.n_tokens / tokens.sequences[0].size
        runs = self._runs(len(passes))
        metric = metric_cost(self.tasks, len(tokens.sequences), self.config.metric_draws)
        # Forward with a graph once for a prompt, backward, twice as long, for each of its draws.
        rounds = metric.n_gradients / (len(tokens.sequences) * self.config.metric_draws)
        gradients = once * rounds * (1 + 2 * self.config.metric_draws)
        metric_seconds = gradients + metric.multiply_adds / _double_rate() if metric.n_gradients else 0.0
        dims = {p.name: p.in_features for p in self.job.selection.input_groups}
        accumulate = sum(tokens.n_tokens * len(s) * dims[g] ** 2 for g, s in sums.steps.items())
        factor = sum(10 * dims[g] ** 3 for g in sums.steps)
        sweep = sum(4 * t.parameter.in_features**2 * t.parameter.out_features for t in self.tasks)
        seconds = once * runs + metric_seconds + (accumulate + factor + sweep) / rate
        return Estimate(held + 24 * widest**2, seconds, runs, metric, metric_seconds)

    def _runs(self, n_passes: int) -> int:
        """Times the calibration set is run: asymmetric calibration runs it in pairs, for each input group."""
        groups = len({t.leader for t in self.tasks if t.leader})
        ahead = any(t.config.metric == "loop" for t in self.tasks)
        asked = {
            "open": max(1, n_passes),
            "closed-loop": max(1, n_passes) + 1,
            "asymmetric": 2 * groups * self.config.sweeps + ahead,
            "equal-rows": 1,
        }
        return asked[self.config.inputs]

    def solve(self, memory: int | None, work: Path | None, progress: Progress) -> dict[str, QuantizedLayer]:
        """Collect and solve, pass by pass; layer by layer where calibration is asymmetric."""
        config = self.config
        if config.inputs == "asymmetric":
            metrics = self._metrics_ahead(work, progress)
            store = LayerStore(work, self._key())
            return Sequential(
                self.job, config.alpha, config.sweeps, self.threads, progress, metrics=metrics, store=store
            ).run(self.tasks)
        if config.inputs == "equal-rows":
            from loopq.calibrate.horizon import EqualRows

            if any(t.config.metric == "loop" for t in self.tasks):
                raise ConfigError("inputs 'equal-rows' are the paper's control: they go with metric 'inputs'")
            rows = EqualRows(self.job, seed=self.job.seed, threads=self.threads).run()
            return self.solve_from(rows, config)
        layers = self._open_loop(memory, work, progress)
        if config.inputs == "closed-loop":
            return recollected(self.job, self.tasks, layers, self.threads, self._metrics)
        return layers

    def _metrics_ahead(self, work: Path | None, progress: Progress) -> dict[str, LoopMetric]:
        """Loop metrics for layers that are solved one after the other: their Hessians come from a pass of their own."""
        chosen = [t for t in self.tasks if t.leader and t.config.metric == "loop"]
        if not chosen:
            return {}
        leaders = sorted({str(t.leader) for t in chosen})
        steps = {k: v for k, v in self.steps().items() if k in leaders}
        sums = HessianSet(self.job, steps, per_step=True, threads=self.threads)
        sums.run_pass(leaders, work=work / "ahead" if work else None, progress=progress)
        return self._collect_metrics(sums, chosen, progress, work / "metric" if work else None)

    def _collect_metrics(
        self, sums: HessianSet, tasks: Sequence[Task], progress: Progress, work: Path | None
    ) -> dict[str, LoopMetric]:
        from loopq.tune.metric import loop_metrics

        return loop_metrics(
            sums,
            self.job.system,
            self.job.tokens,
            tasks,
            n_steps=self.job.selection.n_steps,
            seed=self.job.seed,
            n_draws=self.config.metric_draws,
            progress=progress,
            work=work,
            key=self._key(),
        )

    def _key(self) -> str:
        """Everything that fixes a result of this run."""
        return self.job.fingerprint(self.config.to_json())

    def _open_loop(
        self, memory: int | None, work: Path | None, progress: Progress
    ) -> dict[str, QuantizedLayer]:
        sums = self.hessians()
        parameters: dict[str, SharedParameter] = {p.name: p for p in self.job.selection.parameters}
        tensors, ties = model_tensors(self.job.system.model)
        solver = Solver(
            weight=lambda p: tensors[ties.get(p.name, p.name)],
            source=sums,
            rank_threshold=self.config.rank_threshold,
            threads=self.threads,
            work=work,
            key=self._key(),
            progress=progress,
            metrics=self._metrics,
        )
        done: dict[str, QuantizedLayer] = {}
        unobserved = [t for t in self.tasks if t.leader is None]
        for number, leaders in enumerate(sums.passes(memory) or [[]]):
            if leaders:
                folder = work / f"pass-{number}" if work else None
                sums.run_pass(leaders, work=folder, progress=progress)
            chosen = [t for t in self.tasks if t.leader in leaders] + (unobserved if number == 0 else [])
            beside = work / f"metric-{number}" if work else None
            self._metrics.update(self._collect_metrics(sums, chosen, progress, beside))
            done.update(solver.run(chosen))
            for leader in leaders:
                sums.drop(leader)
        return {name: done[name] for name in parameters if name in done}


def _core_rate(threads: int) -> float:
    """Multiply-adds per second of the accumulation, measured for a few milliseconds."""
    rows, width = 2048, 512
    values = np.ones((rows, width), dtype=np.float32)

    def work() -> None:
        acc = native.HessianAccumulator(width, [0], per_step=False, threads=threads)
        acc.update(0, values)
        # Rows wait until there are enough of them: the work is done at the latest here.
        acc.finish()

    return rows * width * width / _fastest(work)


def _double_rate() -> float:
    """Multiply-adds per second of numpy's product of double-precision matrices, measured for a few milliseconds."""
    left, right = np.ones((256, 512)), np.ones((512, 512))
    return 256 * 512 * 512 / _fastest(lambda: left @ right)


def _fastest(work: Callable[[], object]) -> float:
    """Least seconds of three runs; the first is never the fastest, and others may run beside."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-6)
