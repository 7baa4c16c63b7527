"""Weights outside the loop: embedding tables, heads, layers before and after the loop, rounded to nearest."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from loopq.errors import ConfigError
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.rtn import RTN
from loopq.quantizers.task import Task
from loopq.systems.base import declare

if TYPE_CHECKING:
    from loopq.layers.layer import QuantizedLayer
    from loopq.run.config import QuantConfig
    from loopq.run.engine import Run

#: Matrices with fewer rows or columns stay as they are: gates and the like, whose bytes do not count.
LEAST = 64


def round_outside(run: Run) -> dict[str, QuantizedLayer]:
    """Round the matrices that the loop does not share, to the bits of the run's `outside`; nothing without it.

    These are the weights of linear layers and embedding tables that the adapter does not list. Each is used once a
    token, so that its error is not fed back: at 8 bits it is far below what the loop's own bits cost. Scales are
    searched, groups are those of the run's grid.
    """
    tasks = tasks_outside(run)
    return run.solver(run.sums(), run.journal("outside")).run(tasks) if tasks else {}


def tasks_outside(run: Run) -> list[Task]:
    """The layers that `round_outside` rounds."""
    import torch  # lazy: loopq imports without torch

    bits = run.config.outside
    if bits is None:
        return []
    system = run.job.system
    listed = {p.name for p in run.job.selection.parameters} | set(system.left_out())
    found: list[tuple[str, dict[str, Any]]] = []
    for name, tensor in run.weights.tensors.items():
        module, _, last = name.rpartition(".")
        if last != "weight" or name in listed or len(tensor.shape) != 2 or min(tensor.shape) < LEAST:
            continue
        holder = system.model.get_submodule(module)
        product = isinstance(holder, torch.nn.Linear | torch.nn.Embedding)
        if product or type(holder).__name__ == "Conv1D":
            found.append((module, {"role": "outside", "treatment": "rtn", "reason": "outside the loop"}))
    grid = dataclasses.replace(run.config.layer.grid, bits=bits, symmetric=True)
    config = LayerConfig(grid=grid, method=RTN(scale_search="mse"))
    return [Task(p, config, (), None) for p in declare(system.model, found, 1)]


def refuse_outside(config: QuantConfig, who: str, instead: str) -> None:
    """Refuse to round what is outside the loop where that cannot be.

    Raises
    ------
    ConfigError
        The message says who cannot, and what to do instead.
    """
    if config.outside is not None:
        raise ConfigError(f"outside rounds embedding tables and heads too, which {who}: {instead}")
