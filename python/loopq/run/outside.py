"""Matrices outside the loop, to be rounded: embedding tables, heads, layers before and after the loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from loopq.calibrate.rollouts import Collection
from loopq.errors import ConfigError
from loopq.layers.shared import SharedParameter
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.grid import GridSettings
from loopq.quantizers.rtn import RTN
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig
from loopq.run.plan import Plan
from loopq.storage.names import names_of
from loopq.storage.schema import Object
from loopq.storage.weights import ModelWeights
from loopq.systems.base import LoopedSystem
from loopq.systems.declare import declare
from loopq.terminal.table import some

#: Smaller matrices outside the loop stay unchanged. They are gates and similar weights with negligible bytes.
LEAST = 64


def plan_model(config: QuantConfig, job: Collection) -> Plan:
    """Plan the layers of a model, and the matrices outside its loop.

    Raises
    ------
    ConfigError
        As in `Plan.of`.
    """
    plan = Plan.of(job.selection.parameters, job.selection.input_groups, config)
    return dataclasses.replace(plan, outside=tasks_outside(config, job))


def outside(system: LoopedSystem, listed: Sequence[SharedParameter]) -> tuple[SharedParameter, ...]:
    """Declare the weights of linear layers and tables that an adapter neither lists nor excludes."""
    from torch import nn  # lazy: loopq imports without torch

    known = {owner for p in listed for owner in p.owners}
    known |= {name.rpartition(".")[0] for name in system.left_out()}
    # A tied weight uses its first name.
    first = {name for name, _ in system.model.named_parameters()}
    entries: list[tuple[str, Object]] = []
    for module, holder in system.model.named_modules():
        weight = holder._parameters.get("weight")
        if module in known or f"{module}.weight" not in first:
            continue
        if weight.ndim != 2 or min(weight.shape) < LEAST:
            continue
        if isinstance(holder, nn.Linear | nn.Embedding) or type(holder).__name__ == "Conv1D":
            entries.append((module, {"role": "outside", "treatment": "rtn", "reason": "outside the loop"}))
    return declare(system.model, entries, 1)


def tasks_outside(config: QuantConfig, job: Collection) -> tuple[Task, ...]:
    """Return the matrices outside the loop as tasks of rounding to nearest, if the settings have `outside`.

    These are the weights of linear layers and embedding tables that the adapter does not list. They run once per token,
    outside the loop, so their error does not accumulate. At 8 bits it is far below the cost of the loop's own bits.
    Scales are searched, and groups are those of the run's grid. Where rows are no whole blocks of a GGUF type, the type
    is Q8_0, as in llama.cpp.
    """
    if config.outside in (None, "none"):
        return ()
    tasks = []
    for p in outside(job.system, job.selection.parameters):
        grid = _grid(config, p.in_features)
        if grid is not None:
            tasks.append(Task(p, LayerConfig(grid=grid, method=RTN(scale_search="mse")), (), None))
    return tuple(tasks)


def _grid(config: QuantConfig, columns: int) -> GridSettings | None:
    """Return the grid of a matrix outside the loop. None if no type of GGUF has such rows."""
    grid, asked = config.layer.decided().grid, config.outside
    if isinstance(asked, int):
        # Tables and floats have at most 4 bits.
        levels = grid.levels if asked == 4 else "even"
        grid = dataclasses.replace(grid, bits=asked, symmetric=True, levels=levels)
        # A type of GGUF has bits of its own.
        return grid if grid.make().bits == asked else dataclasses.replace(grid, levels="even")
    for levels in (str(asked), "q8_0"):
        candidate = dataclasses.replace(grid, bits=4, group_size=128, levels=levels, symmetric=True)
        with contextlib.suppress(ConfigError):
            candidate.make().check_columns(columns)
            if columns % candidate.make().gguf_width == 0:
                return candidate
    return None


def tell_share(plan: Plan, job: Collection) -> None:
    """Report the share of the numbers in the blocks' weights that is quantized, and why the rest is not."""
    taken = {t.name for t in plan.tasks}
    declared = job.system.shared_parameters(job.selection.n_steps)
    sizes = {p.name: p.in_features * p.out_features for p in declared}
    reasons = {p.name: p.reason or "excluded by the settings" for p in declared if p.name not in taken}
    names, state = names_of(job.system.model), dict(job.system.model.named_parameters())
    # Input embeddings are outside of the blocks.
    tables = {id(m.weight) for m in job.system.model.modules() if hasattr(m, "num_embeddings")}
    for name, reason in job.system.left_out().items():
        if name in state and name not in taken and id(state[name]) not in tables:
            sizes[name], reasons[name] = state[name].numel(), reason
    total = sum(sizes.values())
    done = sum(n for name, n in sizes.items() if name in taken)
    text = f"quantized: {100 * done / max(total, 1):.1f} % of the {total:,} numbers in the blocks' weights"
    for reason in dict.fromkeys(reasons.values()):
        mine = [name for name, why in reasons.items() if why == reason]
        share = 100 * sum(sizes[name] for name in mine) / max(total, 1)
        text += f"; {share:.1f} % not ({reason}): {some([names.in_file(name) for name in mine], 3)}"
    job.execution.progress.note(text)


def tell_left(plan: Plan, job: Collection, weights: ModelWeights) -> None:
    """Report matrices outside the loop that a run with `outside` leaves unchanged, with the adapter's reason."""
    if plan.config.outside in (None, "none"):
        return
    rounded = {t.name for t in plan.outside}
    for p in outside(job.system, job.selection.parameters):
        if p.name not in rounded:
            job.execution.progress.note(
                f"not rounded outside the loop: {p.name}: rows of {p.in_features} are no whole blocks of a GGUF type"
            )
    for name, reason in job.system.left_out().items():
        known = name in weights.tensors and name not in rounded
        shape = weights.tensors[name].shape if known else ()
        if len(shape) == 2 and min(shape) >= LEAST:
            job.execution.progress.note(f"not rounded outside the loop: {name}: {reason}")
