"""What a run holds in memory at once besides the model: told before it starts, and kept below the limit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loopq.calibrate.collect import HessianSet
from loopq.errors import ConfigError
from loopq.gradients.collect_metrics import metric_cost
from loopq.quantizers.task import Task
from loopq.run.plan import steps_apart

if TYPE_CHECKING:
    from loopq.run.engine import Run

# Matrices of in_features x in_features in double precision that a rotated solve holds besides: H before, the rotation,
# their products. Measured, as is what methods say (`Method.memory`).
ROTATION = 4
# Moments of pairs are of both rollouts and between them.
PAIRED = 3.5


def solve_bytes(task: Task) -> int:
    """Bytes that the solve of one layer takes on top of its Hessian's sums."""
    p, config = task.parameter, task.config
    squares, copies = config.method.memory
    squares += ROTATION * (config.rotation.kind != "none")
    observed = task.input_group is not None
    return 8 * squares * observed * p.in_features**2 + 4 * copies * p.in_features * p.out_features


def pass_bytes(run: Run, sums: HessianSet, input_groups: Sequence[str]) -> int:
    """Bytes of the sums of some inputs, their loop metrics, and the largest solve among their layers."""
    tasks = [t for t in run.tasks if t.input_group in input_groups]
    held = sum(map(sums.n_bytes, input_groups))
    # While a sum is saved, or added up from saved parts, it is there twice more.
    saved = 2 * max(map(sums.n_bytes, input_groups), default=0)
    metric = metric_cost(tasks, len(run.job.tokens.sequences), run.execution.memory).memory
    return held + metric + max(saved, max(map(solve_bytes, tasks), default=0))


def passes(run: Run, sums: HessianSet) -> list[list[str]]:
    """Divide the inputs of a run into passes that keep to its memory limit.

    Raises
    ------
    ConfigError
        One input alone is above it.
    """
    return sums.passes(lambda input_groups: pass_bytes(run, sums, input_groups))


def run_bytes(run: Run) -> int:
    """Bytes of everything that a run holds at once.

    Raises
    ------
    ConfigError
        That is above the limit, and what is asked for cannot be divided into passes.
    """
    sums, n_weights = run.sums(), sum(t.parameter.in_features * t.parameter.out_features for t in run.tasks)
    need = {"passes": max((pass_bytes(run, sums, p) for p in passes(run, sums)), default=0)}
    apart = run.sums(per_step=True)
    everything = pass_bytes(run, apart, list(apart.steps))
    inputs = run.config.inputs.name
    if inputs == "asymmetric":
        # One input at a time.
        paired = apart if steps_apart(run.tasks) else sums
        need["inputs asymmetric"] = max(
            (int(PAIRED * pass_bytes(run, paired, [x])) for x in paired.steps), default=0
        )
    elif inputs != "open":
        need[f"inputs {inputs}"] = everything
    asked = run.config.allocate
    if asked is not None:
        candidates = len(asked.bits) * len(asked.group_sizes)
        each = 4 if asked.score == "ablation" else 12
        need["allocate"] = max(everything, 4 * candidates * n_weights) + each * candidates * n_weights
    limit = run.execution.memory
    what = max(need, key=lambda name: need[name])
    if limit is not None and need[what] > limit:
        raise ConfigError(
            f"{what}: takes {need[what] / 2**20:.2f} MiB at once, above the limit of {limit / 2**20:.2f} MiB: raise "
            "--memory"
        )
    return need[what]


def resident_bytes() -> int:
    """Memory that this process has now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
