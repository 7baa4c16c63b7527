"""What a run will take, told before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import loopq._native as native
from loopq.errors import ConfigError
from loopq.gradients.collect_metrics import MetricCost, metric_cost
from loopq.run.memory import pass_bytes, passes, resident_bytes
from loopq.run.plan import Plan, hessian_work, solve_work, steps_apart
from loopq.run.source import ModelSource

if TYPE_CHECKING:
    import torch

#: Moments of pairs are of both rollouts and between them.
PAIRED = 3.5


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Parameters
    ----------
    memory : int
        Bytes held at once for Hessians, metrics and solves: what the limit is for.
    peak : int
        Bytes of the whole process at most: what it has now and `memory`, or a copy of all weights that get no codes.
    seconds : float
        Everything together, from rates measured on this machine a moment ago.
    n_passes : int
        Times the calibration set is run: more than one where a memory limit or the kind of inputs asks for it.
    metric : MetricCost
        What the loop metric takes; all zero where no layer has one.
    metric_seconds : float
        Its share of `seconds`.
    extra : str
        What choosing bits takes besides, in words.
    """

    memory: int
    peak: int
    seconds: float
    n_passes: int
    metric: MetricCost
    metric_seconds: float
    extra: str

    def __str__(self) -> str:
        """One line to print."""
        passes = f", {self.n_passes} passes over the calibration set" if self.n_passes > 1 else ""
        text = (
            f"about {self.peak / 2**20:.0f} MiB at most, {self.memory / 2**20:.0f} of them for Hessians and solves, "
            f"and {duration(self.seconds)}{passes}"
        )
        if self.metric.n_gradients:
            text += (
                f"; of this {self.metric.n_gradients} gradients for the loop metric: "
                f"{self.metric.memory / 2**20:.0f} MiB and {duration(self.metric_seconds)}"
            )
        return text + self.extra


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimate(plan: Plan, source: ModelSource) -> Estimate:
    """Estimate memory and time from the source's timed rollout and a short measurement of the core, or of a device."""
    sums, tasks, execution = source.sums(plan), plan.tasks, source.execution
    memory = run_bytes(plan, source)
    coded = {t.name for t in tasks}
    dense = sum(t.data.size for name, t in source.weights.tensors.items() if name not in coded)
    tokens = source.job.tokens
    once = source.probe_seconds * tokens.n_tokens / tokens.sequences[0].size
    inputs = {t.input_group for t in tasks if t.input_group and not t.parameter.routed_in}
    metric = metric_cost(tasks, tokens)
    runs = plan.config.inputs.n_runs(len(passes(source.job, tasks, sums)), len(inputs))
    runs += bool(metric.n_gradients) and plan.config.inputs.pairs
    device = source.job.system.device
    metric_seconds = seconds_of(metric, source.probe_seconds, device) if metric.n_gradients else 0.0
    work = hessian_work(tasks, tokens.n_tokens, source.job.selection.shares) + solve_work(tasks)
    widest = max((t.parameter.in_features for t in tasks), default=0)
    core = work / (core_rate(widest, execution.threads) if device.type == "cpu" else _product_rate(device))
    peak = resident_bytes() + max(memory, dense)
    seconds = once * runs + metric_seconds + core
    return Estimate(memory, peak, seconds, runs, metric, metric_seconds, _extra(plan, source))


def run_bytes(plan: Plan, source: ModelSource) -> int:
    """Bytes of everything that a quantization holds at once.

    Raises
    ------
    ConfigError
        That is above the limit, and what is asked for cannot be divided into passes.
    """
    job, tasks, sums = source.job, plan.tasks, source.sums(plan)
    need = {"passes": max((pass_bytes(job, tasks, sums, p) for p in passes(job, tasks, sums)), default=0)}
    apart = source.sums(plan, per_step=True)
    everything = pass_bytes(job, tasks, apart, list(apart.steps))
    inputs = plan.config.inputs
    if inputs.pairs:
        # One input at a time.
        paired = apart if steps_apart(tasks) else sums
        one = (int(PAIRED * pass_bytes(job, tasks, paired, [x])) for x in paired.steps)
        need[f"inputs {inputs.name}"] = max(one, default=0)
    elif inputs.runs_between:
        need[f"inputs {inputs.name}"] = everything
    asked = plan.config.fit
    if asked is not None:
        n_weights = sum(t.parameter.in_features * t.parameter.out_features for t in tasks)
        candidates = len(asked.grids())
        each = 4 if asked.score == "ablation" else 12
        need["fit"] = max(everything, 4 * candidates * n_weights) + each * candidates * n_weights
    limit = source.execution.memory
    what = max(need, key=lambda name: need[name])
    if limit is not None and need[what] > limit:
        raise ConfigError(
            f"{what}: takes {need[what] / 2**20:.2f} MiB at once, above the limit of {limit / 2**20:.2f} MiB: raise "
            "--memory"
        )
    return need[what]


def seconds_of(metric: MetricCost, rollout: float, device: torch.device) -> float:
    """Seconds that loop metrics take on a device, by those of one prompt's rollout."""
    # Forward with a graph once for a prompt; backward, of activations alone, for each of its draws.
    passes = metric.n_gradients / metric.n_draws + metric.n_gradients
    return rollout * passes + metric.multiply_adds / _product_rate(device)


def _extra(plan: Plan, source: ModelSource) -> str:
    """What choosing bits takes besides the quantization, by the timed rollout."""
    asked = plan.config.fit
    if asked is None:
        return ""
    candidates = len(asked.grids()) * len(plan.tasks)
    # One rollout of each candidate for a measured score; forward and backward once for a predicted one.
    n_prompts = min(asked.n_prompts, len(source.job.tokens.sequences))
    rollouts = n_prompts * (candidates if asked.score == "ablation" else 3)
    return f"; besides, about: bits by {asked.score} {duration(source.probe_seconds * rollouts)}"


def core_rate(widest: int, threads: int) -> float:
    """Multiply-adds per second of the accumulation, measured for some milliseconds at a width like the layers'."""
    # Wide layers run at twice the rate of narrow ones; beyond 2048 it grows no more.
    rows, width = 2048, min(max(widest, 512), 2048)
    values = np.ones((rows, width), dtype=np.float32)

    def work() -> None:
        acc = native.HessianAccumulator(width, [0], per_step=False, threads=threads)
        acc.update(0, values)
        # Rows wait until there are enough of them: the work is done at the latest here.
        acc.finish()

    return rows * width * width / _fastest(work)


def _product_rate(device: torch.device) -> float:
    """Multiply-adds per second of a product of single-precision matrices, measured for a few milliseconds."""
    import torch  # lazy: loopq imports without torch

    # What keeps a processor busy for a millisecond is over on a GPU before it is launched.
    rows, width = (256, 512) if device.type == "cpu" else (2048, 2048)
    left, right = torch.ones(rows, width, device=device), torch.ones(width, width, device=device)
    # A number is asked for, so that the product is waited for.
    return rows * width * width / _fastest(lambda: float((left @ right)[0, 0]))


def _fastest(work: Callable[[], object]) -> float:
    """Least seconds of three runs; the first is never the fastest, and others may run beside."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-6)
