"""Memory of a run: reported before it starts, and besides the model kept below the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import loopq._native as native
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.rollouts import Collection
from loopq.errors import ConfigError
from loopq.gradients.collect_metrics import metric_cost
from loopq.models.stream import layers_of
from loopq.quantizers.loop_metric import BLOCK
from loopq.quantizers.task import Task
from loopq.run.plan import Plan, alike, steps_apart
from loopq.storage.model_files import is_streamed

if TYPE_CHECKING:
    from torch import nn

# Additional in_features x in_features matrices of a rotated solve, in double precision: the original H, the rotation
# and their products. The number is measured, as in `Method.memory`.
ROTATION = 4
#: Sums of paired moments: those of both rollouts, and those between them.
PAIRED = 3.5


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of all weights, and of those in memory at once.

    Of a model whose layers are read for each visit these are the largest layer twice, and weights of no layer.
    """

    def total(module: nn.Module) -> int:
        return sum(int(p.numel() * p.element_size()) for p in module.parameters())

    everything = total(model)
    if not is_streamed(model):
        return everything, everything
    layers = [total(layer) for layer in layers_of(model).values()]
    return everything, min(everything, everything - sum(layers) + 2 * max(layers, default=0))


def activation_bytes(plan: Plan, job: Collection) -> int:
    """Bytes of the activations of a batch's rollout, or of a prompt's rollout with its graph for gradients."""
    tokens, model, execution = job.tokens, job.system.model, job.execution
    longest = max(int(s.size) for s in tokens.sequences)
    size = max(int(p.element_size()) for p in model.parameters())
    # Logits and their copies in single precision. Without a head this is a layer's output.
    wide = max((int(p.shape[0]) for p in model.parameters() if p.ndim == 2), default=0)
    # Rows of incomplete blocks wait for the next batch.
    waiting = sum(p.invocations * p.in_features for p in job.selection.distinct_inputs)
    batch = max(job.batch_tokens) * wide * (size + 4) + native.BLOCK_ROWS * size * waiting
    graph = sum(p.invocations * (p.in_features + p.out_features) for p in job.selection.parameters)
    at_once = execution.batch_size if is_streamed(model) else 1
    gradient = at_once * longest * (16 * wide + size * graph)
    return max(batch, gradient * any(t.gradients for t in plan.tasks))


def run_bytes(plan: Plan, job: Collection) -> int:
    """Bytes that a quantization holds at once for sums, metrics and solves.

    Raises
    ------
    ConfigError
        They exceed the limit, and the work cannot be divided into passes.
    """
    tasks, sums = plan.tasks, plan.sums(job)
    need = {"passes": max((pass_bytes(job, tasks, sums, p) for p in passes(job, tasks, sums)), default=0)}
    apart = plan.sums(job, per_step=True)
    inputs = plan.config.inputs
    if inputs.pairs:
        # One input at a time.
        paired = apart if steps_apart(tasks) else sums
        one = (pass_bytes(job, tasks, paired, [x], PAIRED) for x in paired.steps)
        need[f"inputs {inputs.name}"] = max(one, default=0)
    elif inputs.runs_between:
        need[f"inputs {inputs.name}"] = pass_bytes(job, tasks, apart, list(apart.steps))
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


def solve_bytes(task: Task) -> int:
    """Bytes of the solve of one layer, in addition to its Hessian's sums."""
    p, config = task.parameter, task.config
    squares, copies = config.method.memory
    squares += ROTATION * (config.rotates)
    observed = task.input_group is not None
    return 8 * squares * observed * p.in_features**2 + 4 * copies * p.in_features * p.out_features


def pass_bytes(
    job: Collection, tasks: Sequence[Task], sums: HessianSet, input_groups: Sequence[str], copies: float = 1
) -> int:
    """Bytes of so many sums of some inputs, their loop metrics, and the largest solve among their layers."""
    wanted = set(input_groups)
    chosen = [t for t in tasks if t.input_group in wanted]
    held = int(copies * sum(map(sums.n_bytes, input_groups)))
    # A sum takes twice its memory in addition while it is saved, added from saved parts, or read.
    largest = max(map(sums.n_bytes, input_groups), default=0)
    saving = held + 2 * largest
    at_once = job.execution.batch_size if is_streamed(job.system.model) else 1
    metric = metric_cost(chosen, job.tokens, at_once)
    solve = max(map(solve_bytes, chosen), default=0)
    if sums.per_step or copies != 1:
        # Several solves may take them from memory.
        return max(saving, held + max(metric.memory, metric.kept + solve))
    # All sums are collected and written. Then metrics are collected from the files. A solve reads one of each.
    # Allocators keep some of the memory that reading frees: half a sum, as measured.
    one = max(map(metric_bytes, chosen), default=0)
    return max(saving, metric.memory, one + max(3 * largest, largest // 2 + solve))


def metric_bytes(task: Task) -> int:
    """Bytes of a layer's loop metric as a file has it."""
    p = task.parameter
    return 8 * (p.in_features**2 + p.out_features * min(BLOCK, p.out_features)) if task.gradients else 0


def passes(job: Collection, tasks: Sequence[Task], sums: HessianSet) -> list[list[str]]:
    """Divide the inputs of some layers into passes within the memory limit.

    Raises
    ------
    ConfigError
        One input alone exceeds it.
    """
    return sums.passes(lambda input_groups: pass_bytes(job, tasks, sums, input_groups))


def fit_bytes(job: Collection, tasks: Sequence[Task], sums: HessianSet, n_grids: int) -> int:
    """Bytes of some layers on all grids of a choice, and of the sums and the solve."""
    n_weights = sum(t.parameter.in_features * t.parameter.out_features for t in tasks)
    input_groups = list(dict.fromkeys(t.input_group for t in tasks if t.input_group))
    return pass_bytes(job, tasks, sums, input_groups) + 4 * n_grids * n_weights


def fit_parts(job: Collection, tasks: Sequence[Task], sums: HessianSet, n_grids: int) -> list[list[Task]]:
    """Divide layers into parts for a choice of grids. All candidates of a part fit the memory limit.

    Raises
    ------
    ConfigError
        The layers of one input alone exceed it.
    """
    limit = job.execution.memory
    parts: list[list[Task]] = []
    for group in alike(tasks):
        both = [*(parts[-1] if parts else []), *group]
        if parts and (limit is None or fit_bytes(job, both, sums, n_grids) <= limit):
            parts[-1] = both
            continue
        need = fit_bytes(job, group, sums, n_grids)
        if limit is not None and need > limit:
            raise ConfigError(
                f"fit: the candidates of layer {group[0].name} take {need / 2**20:.2f} MiB, above the limit of "
                f"{limit / 2**20:.2f} MiB: raise --memory, or give fewer in --set fit_bits=... and "
                "--set fit_group_sizes=..."
            )
        parts.append(list(group))
    return parts


def dumped_bytes(tasks: Sequence[Task], per_step: bool) -> int:
    """Bytes of the largest solve from a dump: the sums as a file has them and as the core does, then the solve."""

    def sums(task: Task) -> int:
        kept = len(task.steps) if per_step else 1
        return 2 * kept * 8 * task.parameter.in_features**2 if task.input_group is not None else 0

    return max((sums(task) + solve_bytes(task) for task in tasks), default=0)
