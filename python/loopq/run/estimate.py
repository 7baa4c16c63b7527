"""Estimated cost of a run, reported before it starts."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import loopq._native as native
from loopq.calibrate.rollouts import Collection
from loopq.errors import ConfigError
from loopq.gradients.collect_metrics import MetricCost, metric_cost
from loopq.quantizers.base import Method, Problem, has_twins
from loopq.quantizers.grid import GridSettings
from loopq.quantizers.loop_metric import BLOCK, LoopMetric
from loopq.quantizers.task import Task
from loopq.run.budget import SCORED
from loopq.run.memory import fit_bytes, fit_parts, pass_bytes, passes
from loopq.run.plan import Plan, alike, hessian_work, solve_work, steps_apart
from loopq.run.solver import together
from loopq.settings.execution import resident_bytes
from loopq.storage.weights import ModelWeights

if TYPE_CHECKING:
    import torch

#: Sums of paired moments: those of both rollouts, and those between them.
PAIRED = 3.5
#: Inputs of a layer whose solve on a device takes launches and hardly any arithmetic.
PROBED = 256


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a run.

    Parameters
    ----------
    memory : int
        Bytes held at once for Hessians, metrics and solves. The memory limit applies to them.
    peak : int
        Maximum bytes of the whole process: its present bytes plus `memory`, or plus a copy of all weights without
        codes.
    seconds : float
        Total time, from rates that are measured on this machine just before.
    n_passes : int
        Runs over the calibration set. A memory limit or the kind of inputs can require several.
    metric : MetricCost
        Cost of the loop metric. It is zero if no layer has one.
    metric_seconds : float
        Share of the loop metric in `seconds`.
    extra : str
        Additional cost of the choice of bits, in words.
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


def estimate(plan: Plan, job: Collection, weights: ModelWeights, probe_seconds: float) -> Estimate:
    """Estimate memory and time from a timed rollout and a short measurement of the core, or of a device.

    Parameters
    ----------
    plan, job, weights
        Layers, model with prompts, and the model's weights.
    probe_seconds : float
        Seconds of a rollout of the first prompt.
    """
    sums, tasks, tokens = plan.sums(job), plan.tasks, job.tokens
    memory = run_bytes(plan, job)
    coded = {t.name for t in tasks}
    dense = sum(t.data.size for name, t in weights.tensors.items() if name not in coded)
    once = probe_seconds * tokens.n_tokens / tokens.sequences[0].size
    inputs = {t.input_group for t in tasks if t.input_group and not t.parameter.routed_in}
    parts = passes(job, tasks, sums)
    # Each pass takes the gradients of all prompts, for the sums of its own layers.
    shares = job.selection.shares
    costs = [metric_cost([t for t in tasks if t.input_group in part], tokens) for part in parts]
    gradients, most = sum(c.n_gradients for c in costs), max((c.memory for c in costs), default=0)
    metric = dataclasses.replace(
        metric_cost(tasks, tokens, shares=shares), n_gradients=gradients, memory=most
    )
    runs = plan.config.inputs.n_runs(len(parts), len(inputs))
    runs += bool(metric.n_gradients) and plan.config.inputs.pairs
    device = job.system.device
    metric_seconds = seconds_of(metric, probe_seconds, device) if metric.n_gradients else 0.0
    work = hessian_work(tasks, tokens.n_tokens, shares) + solve_work(tasks)
    widest = max((t.parameter.in_features for t in tasks), default=0)
    rate = core_rate(widest, job.execution.threads) if device.type == "cpu" else product_rate(device)
    peak = resident_bytes() + max(memory, dense)
    seconds = once * runs + metric_seconds + work / rate
    if has_twins(str(device)):
        chosen = ([t for t in tasks if t.input_group in part] for part in parts)
        groups = [g for each in chosen for g in together(each, str(device), job.execution.memory)]
        # Inputs of two rollouts are solved one by one.
        groups = alike(tasks) if plan.config.inputs.pairs else groups
        seconds += launch_seconds(groups, str(device), min(widest, PROBED))
    return Estimate(memory, peak, seconds, runs, metric, metric_seconds, _extra(plan, job, probe_seconds))


def run_bytes(plan: Plan, job: Collection) -> int:
    """Bytes that a quantization holds at once.

    Raises
    ------
    ConfigError
        They exceed the limit, and the work cannot be divided into passes.
    """
    tasks, sums = plan.tasks, plan.sums(job)
    need = {"passes": max((pass_bytes(job, tasks, sums, p) for p in passes(job, tasks, sums)), default=0)}
    apart = plan.sums(job, per_step=True)
    everything = pass_bytes(job, tasks, apart, list(apart.steps))
    inputs = plan.config.inputs
    if inputs.pairs:
        # One input at a time.
        paired = apart if steps_apart(tasks) else sums
        one = (pass_bytes(job, tasks, paired, [x], PAIRED) for x in paired.steps)
        need[f"inputs {inputs.name}"] = max(one, default=0)
    elif inputs.runs_between:
        need[f"inputs {inputs.name}"] = everything
    asked = plan.config.fit
    if asked is not None:
        n_grids = len(asked.grids(plan.config.layer.grid))
        parts = fit_parts(job, tasks, apart, n_grids)
        need["fit"] = max(fit_bytes(job, part, apart, n_grids) for part in parts)
    limit = job.execution.memory
    what = max(need, key=lambda name: need[name])
    if limit is not None and need[what] > limit:
        raise ConfigError(
            f"{what}: takes {need[what] / 2**20:.2f} MiB at once, above the limit of {limit / 2**20:.2f} MiB: raise "
            "--memory"
        )
    return need[what]


def seconds_of(metric: MetricCost, rollout: float, device: torch.device) -> float:
    """Seconds of loop metrics on a device, given those of one prompt's rollout."""
    # One forward pass with a graph per prompt; one backward pass, of activations only, per draw.
    passes = metric.n_gradients / metric.n_draws + metric.n_gradients
    return rollout * passes + metric.multiply_adds / product_rate(device)


def launch_seconds(groups: Sequence[Sequence[Task]], device: str, probed: int) -> float:
    """Seconds for which the solves of groups of layers wait for a device's launches, besides their arithmetic.

    A twin launches the same operations for a column of one layer or of all that run together. So a layer of `probed`
    columns is timed for each method and grid. Both are added: sweeps wait for launches, and factors for arithmetic.
    """
    rows: Counter[tuple[int, str | None, Method, GridSettings, int]] = Counter()
    for number, group in enumerate(groups):
        for task in (t.as_solved for t in group if t.input_group):
            p, config = task.parameter, task.config
            # Layers of one input run as one, unless each has a metric of its own.
            same = task.name if task.gradients else task.input_group
            rows[number, same, config.method, config.grid, p.in_features] += p.out_features
    columns: Counter[tuple[Method, GridSettings]] = Counter()
    for _, method, grid, width, n in dict.fromkeys((key[0], *key[2:], n) for key, n in rows.items()):
        # Under a metric on both sides the rows of a block wait for each other.
        columns[method, grid] += width * (-(-min(n, BLOCK) // native.TOGETHER) if method.gradients else 1)
    return sum(n * _column_seconds(*kind, probed, device) for kind, n in columns.items())


def _column_seconds(method: Method, grid: GridSettings, width: int, device: str) -> float:
    """Seconds of a column when a layer of few rows is solved on a device; 0 if the processor solves it."""
    values = np.random.default_rng(0).standard_normal((native.TOGETHER + width, width), dtype=np.float32)
    hessian = np.asarray(values.T @ values, dtype=np.float64)
    metric = LoopMetric((np.eye(native.TOGETHER),), hessian, 1) if method.gradients else None
    problem = Problem("probe", values[: native.TOGETHER], hessian, grid, metric=metric, device=device)
    solves = method.has_twin and problem.is_common
    return _fastest(lambda: method.twin([problem]), 2) / width if solves else 0.0


def _extra(plan: Plan, job: Collection, probe_seconds: float) -> str:
    """Additional cost of the choice of bits, from the timed rollout."""
    asked = plan.config.fit
    if asked is None:
        return ""
    candidates = len(asked.grids(plan.config.layer.grid)) * len(plan.tasks)
    rollouts = min(SCORED, len(job.tokens.sequences)) * candidates
    return f"; besides, about: choice of grids {duration(probe_seconds * rollouts)}"


def core_rate(widest: int, threads: int) -> float:
    """Multiply-adds per second of the accumulation, measured for some milliseconds at a width like the layers'."""
    # Wide layers run at twice the rate of narrow ones. Beyond 2048 the rate stays constant.
    rows, width = 2048, min(max(widest, 512), 2048)
    values = np.ones((rows, width), dtype=np.float32)

    def work() -> None:
        acc = native.HessianAccumulator(width, [0], per_step=False, threads=threads)
        acc.update(0, values)
        # Rows are buffered, so this completes the work.
        acc.finish()

    return rows * width * width / _fastest(work)


def product_rate(device: torch.device | str = "cpu") -> float:
    """Multiply-adds per second of a product of single-precision matrices, measured for a few milliseconds."""
    import torch  # lazy: loopq imports without torch

    # A GPU finishes a CPU's millisecond of work faster than it launches it.
    rows, width = (256, 512) if torch.device(device).type == "cpu" else (2048, 2048)
    left, right = torch.ones(rows, width, device=device), torch.ones(width, width, device=device)
    # Reading a number waits for the product.
    return rows * width * width / _fastest(lambda: float((left @ right)[0, 0]))


def _fastest(work: Callable[[], object], n_runs: int = 3) -> float:
    """Least seconds of some runs. The first run is never the fastest, and other programs may interfere."""
    times = []
    for _ in range(n_runs):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-6)
