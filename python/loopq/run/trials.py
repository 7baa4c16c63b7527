"""Several grids from one collection: the size of each, and its KL on prompts that are held back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError
from loopq.evaluation.compare import Measurement, compare
from loopq.formats.checkpoint import Checkpoint
from loopq.layers.layer import Dequantized
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.model_source import ModelSource
from loopq.run.source import Layers

#: Share of the calibration prompts that are held back. The KL of single prompts differs by a factor of two and more.
HELD = 1 / 4


@dataclass(frozen=True)
class Trial:
    """One grid.

    Parameters
    ----------
    bits : int
        Bits of a code.
    checkpoint : Checkpoint
        Layers on this grid, and the rest of the model.
    measured : Measurement
        KL and agreement on the held prompts.
    """

    bits: int
    checkpoint: Checkpoint
    measured: Measurement


def divide(tokens: TokenSet) -> tuple[int, int]:
    """Return the number of prompts to calibrate on, and of those that are held back.

    Raises
    ------
    ConfigError
        There is one prompt only.
    """
    count = len(tokens.sequences)
    held = max(1, round(HELD * count))
    if held >= count:
        raise ConfigError("a table holds prompts back to measure on: give two calibration prompts or more")
    return count - held, held


def try_grids(source: ModelSource, config: QuantConfig, bits: Sequence[int], held: TokenSet) -> list[Trial]:
    """Solve all layers on several grids, and measure each on prompts that the solver has not seen.

    Parameters
    ----------
    source : ModelSource
        Model and calibration prompts. Hessians and loop metrics are collected once, in as many passes as memory needs.
    config : QuantConfig
        Settings of every grid but its bits. Inputs are those of the full-precision rollout.
    bits : sequence of int
        Bits of each grid.
    held : TokenSet
        Prompts that are not among those of the source.

    Raises
    ------
    ConfigError
        The settings choose the grids themselves, or round matrices outside the loop.
    """
    if config.fit is not None:
        raise ConfigError("fit chooses the grids, and a table has one for all layers: give one of the two")
    refuse_outside(config, "a table leaves as they are", "leave it away")
    first = source.prepare(source.plan(config.changed(inputs="open", bits=bits[0])))
    plans = {n: source.plan(first.config.changed(bits=n)) for n in bits}
    solved: dict[int, Layers] = {n: {} for n in bits}
    with contextlib.closing(source.parts(first, first.tasks)) as parts:
        for tasks, hessians, metrics in parts:
            names = {task.name for task in tasks}
            for n, plan in plans.items():
                source.execution.progress.note(f"{n} bits:")
                part = [task for task in plan.tasks if task.name in names]
                solved[n].update(source.solver(plan, hessians, metrics).run(part))
    job, tensors = source.job, source.weights.tensors
    variants = {str(n): Dequantized(layers) for n, layers in solved.items()}
    how = dataclasses.replace(source.execution, work=None)
    depth, seed = job.selection.n_steps, source.execution.seed
    _, *measurements = compare(job.system, variants, held, n_steps=depth, seeds=(seed,), execution=how)
    return [
        Trial(n, Checkpoint(layers, {k: v for k, v in tensors.items() if k not in layers}, {}, {}), measured)
        for (n, layers), measured in zip(solved.items(), measurements, strict=True)
    ]
