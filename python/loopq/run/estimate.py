"""Memory and time of a quantization, from the shapes of its layers and short measurements on this processor."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import loopq._native as native
from loopq.calibrate.rollouts import Collection
from loopq.gradients.collect_metrics import MetricCost, metric_cost, reached
from loopq.quantizers.base import Method, Problem, has_twins
from loopq.quantizers.grid import GridSettings
from loopq.quantizers.loop_metric import BLOCK, LoopMetric
from loopq.quantizers.task import Task
from loopq.run.budget import SCORED
from loopq.run.memory import PAIRED, activation_bytes, passes, run_bytes, weight_bytes
from loopq.run.plan import Plan, alike, factor_work, hessian_work, sweep_work
from loopq.run.solver import together
from loopq.settings.execution import resident_bytes
from loopq.storage.model_files import is_streamed
from loopq.systems.declare import parameter_of
from loopq.terminal.table import size

if TYPE_CHECKING:
    import torch

#: Largest width of a timed solve. Wider ones are scaled by their multiply-adds.
PROBED = 256
#: Multiply-adds of the accumulation that a timed solve may cost, about.
AFFORDED = 4e9
#: Assumed bytes per second of the disk.
DISK = 1e9
#: A rollout that takes longer than this is timed once, with one prompt.
_LONG = 1.0


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a quantization, in bytes and seconds.

    Parameters
    ----------
    weights, held : int
        The model, and its weights that are in memory at once.
    memory : int
        Hessians, metrics and solves at once. The memory limit applies to them.
    process, added : int
        The process without weights, and all that the run adds to it: `memory` and activations, or the checkpoint.
    codes, output : int
        Disk for codes before writing, one byte per code, and for the checkpoint.
    limit : int or None
        What `held` and `memory` may take. None if the system does not report its free memory.
    n_passes, n_tokens, n_gradients : int
        Runs over the calibration set, its tokens, and backward passes for the loop metric. A memory limit or the kind
        of inputs can require several runs.
    seconds : mapping of str to float
        Each part of the work.
    """

    weights: int
    held: int
    memory: int
    process: int
    added: int
    codes: int
    output: int
    limit: int | None
    n_passes: int
    n_tokens: int
    n_gradients: int
    seconds: Mapping[str, float]

    @property
    def peak(self) -> int:
        """Maximum bytes of the whole process."""
        return self.process + self.held + self.added

    @property
    def fits(self) -> bool:
        """Whether weights, Hessians and solves are within the limit."""
        return self.limit is None or self.held + self.memory <= self.limit

    @property
    def time(self) -> str:
        """The total time and its parts, in words."""
        parts = ", ".join(f"{what} {duration(s)}" for what, s in self.seconds.items() if s >= 1)
        return duration(sum(self.seconds.values())) + (f" ({parts})" if parts else "")

    def __str__(self) -> str:
        """One line to print."""
        passes = f"; {self.n_passes} passes over the calibration set" if self.n_passes > 1 else ""
        gradients = f"; {self.n_gradients} gradients for the loop metric" if self.n_gradients else ""
        return (
            f"about {self.peak / 2**20:.0f} MiB at most, {self.memory / 2**20:.0f} of them for Hessians and solves, "
            f"and {self.time}{passes}{gradients}"
        )

    def lines(self) -> list[str]:
        """Return the estimate as lines to print."""
        how = "all in memory" if self.held == self.weights else "read layer by layer, since they do not fit"
        limit = "" if self.limit is None else f" of {size(self.limit)}"
        fits = "" if self.fits else "; this is above the limit: take a machine with more memory"
        return [
            f"weights: {size(self.weights)} ({self.weights:,} bytes), {how}: {size(self.held)} at once",
            f"Hessians, loop metrics and solves: {size(self.memory)} at once, in {self.n_passes} passes over "
            f"{self.n_tokens:,} tokens",
            f"disk: checkpoint {size(self.output)}, and until it is written {size(self.codes)} for codes and "
            f"{size(self.output)} for solved layers; an export to another format holds "
            f"{size(2 * self.codes + self.output)}",
            f"memory: {size(self.peak)} at most; of it weights, Hessians and solves {size(self.held + self.memory)}"
            f"{limit}{fits}",
            f"time: {self.time}, {sum(self.seconds.values()):.0f} seconds in all",
        ]


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimate(plan: Plan, job: Collection, token: float, gradient: float) -> Estimate:
    """Estimate memory and time of a plan.

    Parameters
    ----------
    plan, job
        Layers, and the model with its prompts.
    token : float
        Seconds of a rollout for each token, or 0 if the model has no values. Then multiply-adds count.
    gradient : float
        Seconds of the first prompt's rollout with a graph and of its backward pass, or 0.

    Raises
    ------
    ConfigError
        The work exceeds the memory limit and cannot be divided into passes.
    """
    tasks, tokens, model = plan.tasks, job.tokens, job.system.model
    memory, sums = run_bytes(plan, job), plan.sums(job)
    parts = [[t for t in tasks if t.input_group in part] for part in passes(job, tasks, sums)]
    # Each pass takes the gradients of all prompts, for the sums of its own layers.
    metrics = [metric_cost(part, tokens, shares=job.selection.shares) for part in parts]
    n_gradients, inputs = sum(m.n_gradients for m in metrics), plan.config.inputs
    n_inputs = len({t.input_group for t in tasks if t.input_group and not t.parameter.routed_in})
    n_passes = inputs.n_runs(len(parts), n_inputs) + bool(n_gradients and inputs.pairs)
    weights, held = weight_bytes(model)
    codes, output = _stored(tasks, weights, job)
    # Weights with values are already in the process.
    process = resident_bytes() - (held if token and not is_streamed(model) else 0)
    added = max(memory + activation_bytes(plan, job), output)
    files = sum(map(sums.n_bytes, sums.steps)) + sum(m.kept for m in metrics) + codes + output
    seconds = _model_seconds(job, token, gradient, metrics, n_passes) | _solve_seconds(plan, job, parts)
    # Each is hashed and written, and read and hashed.
    seconds["files"] = 4 * files / DISK
    if plan.config.fit is not None:
        # Every layer is solved on every grid, and each of these is scored by rollouts.
        n_grids, n_prompts = len(plan.config.fit.grids(plan.config.layer.grid)), len(tokens.sequences)
        scored = min(SCORED, n_prompts) / n_prompts * len(tasks) * n_grids
        seconds["choice of grids"] = seconds["rollouts"] / n_passes * scored + n_grids * seconds["solves"]
    limit = None if job.execution.memory is None else job.execution.memory + held
    return Estimate(
        weights,
        held,
        memory,
        process,
        added,
        codes,
        output,
        limit,
        n_passes,
        tokens.n_tokens,
        n_gradients,
        seconds,
    )


def _stored(tasks: Sequence[Task], weights: int, job: Collection) -> tuple[int, int]:
    """Bytes of codes, and of the checkpoint with the tensors that stay as they are."""
    grids = [(t.parameter, t.config.method.make_grid(t.config.grid)) for t in tasks]
    scales = sum(grid.n_groups(p.in_features) * p.out_features for p, grid in grids)
    packed = sum(grid.bits * p.in_features * p.out_features for p, grid in grids) // 8
    full = sum(
        p.in_features * p.out_features * parameter_of(job.system.model, p).element_size() for p, _ in grids
    )
    codes = sum(p.in_features * p.out_features for p, _ in grids)
    return codes, max(0, weights - full) + packed + 2 * scales


def _model_seconds(
    job: Collection, token: float, gradient: float, metrics: Sequence[MetricCost], n_passes: int
) -> dict[str, float]:
    """Seconds of rollouts, gradients, and reading of weights for each visit of a layer."""
    tokens, model, parameters = job.tokens, job.system.model, job.selection.parameters
    streamed, rate = is_streamed(model), product_rate(_device(job))
    inside = [(p, p.in_features * p.out_features) for p in parameters]
    if not token:
        # Weights outside of the loop count once.
        outside = sum(p.numel() for p in model.parameters()) - sum(n for _, n in inside)
        token = sum(n * p.invocations * job.selection.shares.get(p.name, 1.0) for p, n in inside)
        token = (token + max(0, outside)) / rate
    rollout = token * tokens.n_tokens / len(tokens.sequences)
    n_gradients = sum(m.n_gradients for m in metrics)
    # A forward pass with a graph per prompt, and a backward pass, of activations only, per draw. Layers that are read
    # for each visit run forward once more.
    prompts = sum(m.n_gradients / m.n_draws for m in metrics) * (1 + streamed)
    products = sum(m.multiply_adds for m in metrics) / rate
    seconds = {
        "rollouts": token * tokens.n_tokens * n_passes,
        "gradients": prompts * rollout + n_gradients * max(gradient - rollout, rollout) + products,
    }
    if streamed:
        again = sum((p.invocations - 1) * n * parameter_of(model, p).element_size() for p, n in inside)
        visits = n_passes * len(job.batch_tokens) + 2 * -(-n_gradients // job.execution.batch_size)
        seconds["reading weights"] = visits * (weight_bytes(model)[0] + again) / DISK
    return seconds


def _solve_seconds(plan: Plan, job: Collection, chosen: Sequence[Sequence[Task]]) -> dict[str, float]:
    """Seconds of Hessians, factors and solves."""
    tasks, device, threads = plan.tasks, _device(job), job.execution.threads
    inputs, cores = plan.config.inputs, threads or os.cpu_count() or 1
    widest = max((t.parameter.in_features for t in tasks), default=0)
    sums = hessian_work(tasks, job.tokens.n_tokens, job.selection.shares)
    times = inputs.n_runs(1, 1)
    rate = core_rate(widest, threads) if device == "cpu" else product_rate(device)
    seconds = {
        "Hessians": sums * (PAIRED * times / 2 if inputs.pairs else times) / rate,
        "factors": times * factor_work(tasks) / rate,
    }
    if has_twins(device):
        groups = [g for each in chosen for g in together(each, device, job.execution.memory)]
        # Inputs of two rollouts are solved one by one.
        groups = alike(tasks) if inputs.pairs else groups
        launches = launch_seconds(groups, device, min(widest, PROBED))
        seconds["solves"] = times * (launches + sum(map(sweep_work, tasks)) / rate)
        return seconds
    seconds["solves"] = 0.0
    for task in (t.as_solved for t in (*tasks, *plan.outside)):
        p, method = task.parameter, task.config.method
        one = unit_seconds(method, task.config.grid, p.in_features)
        # Coupled rows of a block wait for each other.
        busy = min(cores, -(-p.out_features // BLOCK)) if method.gradients else cores
        seconds["solves"] += times * one * sweep_work(task) / busy
    return seconds


def _device(job: Collection) -> str:
    """Device of the work: the processor for a model without values."""
    device = job.system.device
    return "cpu" if device.type == "meta" else str(device)


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
    problem = _problem(method, grid, native.TOGETHER, width, device)
    solves = method.has_twin and problem.is_common
    return _fastest(lambda: method.twin([problem]), 2, device) / width if solves else 0.0


@functools.cache
def unit_seconds(method: Method, grid: GridSettings, width: int) -> float:
    """Seconds of one thread for each unit of `sweep_work`, from two small solves that differ in their rows."""
    few, many = 2 * native.TOGETHER, 6 * native.TOGETHER
    per_column, per_weight = method.work[1:]
    columns = min(width, PROBED)
    dear = many * (per_column * columns + per_weight + 1)
    # No grid has blocks of more than 64 columns where the search is dear.
    columns = min(columns, max(64, int(AFFORDED / dear)))
    small, large = (_problem(method, grid, rows, columns, "cpu") for rows in (few, many))
    taken = [_fastest(lambda p=p: method.quantize(p), 2) for p in (small, large)]  # type: ignore[misc]
    work = (many - few) * columns * (per_column * columns + per_weight + 1)
    return max(taken[1] - taken[0], 0.1 * taken[1]) / work


def _problem(method: Method, grid: GridSettings, rows: int, width: int, device: str) -> Problem:
    """Return a small random problem. One thread solves it."""
    values = np.random.default_rng(0).standard_normal((rows + width, width), dtype=np.float32)
    hessian = np.asarray(values.T @ values, dtype=np.float64)
    metric = LoopMetric((np.eye(rows),), hessian, 1) if method.gradients else None
    return Problem("probe", values[:rows], hessian, grid, metric=metric, device=device, threads=1)


def timed_rollout(job: Collection, seconds: float) -> float:
    """Seconds of a rollout for each token, given those of a first one. A batch is timed unless that takes long."""
    system, n_steps = job.system, job.selection.n_steps
    batch = next(job.tokens.batches(job.execution.batch_size if seconds < _LONG else 1, job.execution.seed))
    # A number of the result waits for the device.
    taken = _fastest(lambda: float(system.rollout(batch, n_steps).flatten()[0]), 1, system.device)
    return taken / int(batch.input_ids.numel())


def timed_gradient(job: Collection, tasks: Sequence[Task]) -> float:
    """Seconds of the first prompt's rollout with a graph and of its backward pass; 0 if no layer takes gradients."""
    chosen = [t for t in tasks if t.gradients]
    how = job.selection.n_steps, job.execution.seed
    work = functools.partial(reached, job.system, job.tokens, chosen, *how)
    return _fastest(work, 1, job.system.device) if chosen else 0.0


@functools.cache
def core_rate(widest: int, threads: int) -> float:
    """Multiply-adds per second of the accumulation, measured for some milliseconds at a width like the layers'."""
    # Wide layers run at twice the rate of narrow ones. Beyond 2048 the rate stays constant.
    rows, width = 2048, min(max(widest, 64), 2048)
    values = np.ones((rows, width), dtype=np.float32)

    def work() -> None:
        acc = native.HessianAccumulator(width, [0], per_step=False, threads=threads)
        acc.update(0, values)
        # Rows are buffered, so this completes the work.
        acc.finish()

    return rows * width * width / _fastest(work)


@functools.cache
def product_rate(device: str = "cpu") -> float:
    """Multiply-adds per second of a product of single-precision matrices, measured for a few milliseconds."""
    import torch  # lazy: loopq imports without torch

    # A GPU finishes a CPU's millisecond of work faster than it launches it.
    rows, width = (256, 512) if torch.device(device).type == "cpu" else (2048, 2048)
    left, right = torch.ones(rows, width, device=device), torch.ones(width, width, device=device)
    # Reading a number waits for the product.
    return rows * width * width / _fastest(lambda: float((left @ right)[0, 0]), 3, device)


def _fastest(work: Callable[[], object], n_runs: int = 3, device: torch.device | str = "cpu") -> float:
    """Least seconds of some runs. The first run is never the fastest, and other programs may interfere.

    On the CPU, seconds in which this process does not run do not count.
    """
    times = []
    for _ in range(n_runs):
        began, used = time.perf_counter(), time.process_time()
        work()
        times.append(time.perf_counter() - began)
        if str(device) == "cpu":
            times[-1] = min(times[-1], time.process_time() - used)
    return max(min(times), 1e-6)
