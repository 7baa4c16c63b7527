"""Several settings side by side from one collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.select import Selection, select
from loopq.checkpoint.layer import QuantizedLayer
from loopq.checkpoint.model_files import model_tensors
from loopq.config import BATCH_SIZE, PRESETS, QuantConfig
from loopq.progress import Progress
from loopq.quantizers.metric import LoopMetric
from loopq.quantizers.solve import Solver, Source, tasks_of
from loopq.systems.base import LoopedSystem

#: Fields of `LayerConfig` for the best closed form there is: no knob to turn, the same bytes and file format.
LOOP: dict[str, Any] = dict(PRESETS["best"])


def solve_arm(
    sums: Source,
    selection: Selection,
    system: LoopedSystem,
    config: QuantConfig,
    threads: int = 0,
    metrics: Mapping[str, LoopMetric] | None = None,
) -> dict[str, QuantizedLayer]:
    """Quantize a selection once from Hessians that are there for each step.

    Parameters
    ----------
    sums : HessianSet
        Accumulators, each step apart.
    selection : Selection
        Parameters and input groups.
    system : LoopedSystem
        Full-precision model.
    config : QuantConfig
        Settings of this arm.
    threads : int
        Threads; 0 takes all cores.
    metrics : mapping of str to LoopMetric, optional
        Loop metrics (`loopq.tune.metric`), where the settings ask for them.
    """
    tensors, ties = model_tensors(system.model)
    tasks, _ = tasks_of(selection.parameters, selection.leaders, config)
    solver = Solver(
        lambda p: tensors[ties.get(p.name, p.name)],
        sums,
        config.rank_threshold,
        threads,
        metrics=metrics or {},
    )
    return solver.run(tasks)


def collect_all_steps(
    system: LoopedSystem,
    tokens: TokenSet,
    *,
    n_steps: int | None = None,
    include: Sequence[str] = (),
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    threads: int = 0,
    progress: Progress | None = None,
) -> tuple[HessianSet, Selection]:
    """Collect the Hessian of every shared layer at every step, each step apart."""
    selection = select(system, tokens, n_steps=n_steps, include=include, seed=seed)
    job = Collection(system, tokens, selection, batch_size, seed)
    steps = {p.name: list(range(p.invocations)) for p in selection.input_groups}
    sums = HessianSet(job, steps, per_step=True, threads=threads)
    sums.run_pass(list(steps), progress=progress)
    return sums, selection
