"""Memory of a run besides the model: reported before it starts, and kept below the limit."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.calibrate.collect import Collection, HessianSet
from loopq.gradients.collect_metrics import metric_cost
from loopq.quantizers.task import Task

# Additional in_features x in_features matrices of a rotated solve, in double precision: the original H, the rotation
# and their products. The number is measured, as in `Method.memory`.
ROTATION = 4


def solve_bytes(task: Task) -> int:
    """Bytes of the solve of one layer, in addition to its Hessian's sums."""
    p, config = task.parameter, task.config
    squares, copies = config.method.memory
    squares += ROTATION * (config.rotation.kind != "none")
    observed = task.input_group is not None
    return 8 * squares * observed * p.in_features**2 + 4 * copies * p.in_features * p.out_features


def pass_bytes(
    job: Collection, tasks: Sequence[Task], sums: HessianSet, input_groups: Sequence[str], copies: float = 1
) -> int:
    """Bytes of so many sums of some inputs, their loop metrics, and the largest solve among their layers."""
    chosen = [t for t in tasks if t.input_group in input_groups]
    held = int(copies * sum(map(sums.n_bytes, input_groups)))
    # A sum takes twice its memory in addition while it is saved or added from saved parts.
    saved = 2 * max(map(sums.n_bytes, input_groups), default=0)
    # Metrics are collected from all sums, and then the layers are solved.
    metric = metric_cost(chosen, job.tokens)
    return held + max(metric.memory + saved, metric.kept + max(map(solve_bytes, chosen), default=0))


def passes(job: Collection, tasks: Sequence[Task], sums: HessianSet) -> list[list[str]]:
    """Divide the inputs of some layers into passes within the memory limit.

    Raises
    ------
    ConfigError
        One input alone exceeds it.
    """
    return sums.passes(lambda input_groups: pass_bytes(job, tasks, sums, input_groups))


def dumped_bytes(tasks: Sequence[Task], per_step: bool) -> int:
    """Bytes of the largest solve from a dump: the sums as a file has them and as the core does, then the solve."""

    def sums(task: Task) -> int:
        kept = len(task.steps) if per_step else 1
        return 2 * kept * 8 * task.parameter.in_features**2 if task.input_group is not None else 0

    return max((sums(task) + solve_bytes(task) for task in tasks), default=0)
