"""Layers divided among processes, by claims.

Claims need no meeting. Processes on any machines that see the same folder take unclaimed pieces. They also take over
the pieces of killed processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopq.errors import CheckpointError, ConfigError, LoopqError
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_any
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig
from loopq.run.dump_source import refuse_rollouts
from loopq.run.plan import Plan, solve_work
from loopq.run.ranks import Ranks
from loopq.run.solver import Solver, groups_of, save_layer
from loopq.run.source import Layers, Source
from loopq.settings.execution import POLL
from loopq.storage.files import json_bytes
from loopq.storage.folders import own_folder, remove_own
from loopq.storage.lock import Claims, check_out, is_written, work_folder


@dataclass(frozen=True)
class Team:
    """Processes that divide one quantization, through the work folder of its output.

    Parameters
    ----------
    out : Path
        Folder for the checkpoint. All processes see it.
    shard : (int, int) or None
        K of N, from 1: solve the K-th of N parts of the layers without waiting for others.
    ranks : Ranks or None
        This process among those that collect the Hessians of a model. A dump needs no ranks.
    """

    out: Path
    shard: tuple[int, int] | None = None
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise ConfigError(f"shard must be K of N, K from 1 to N; got {self.shard[0]} of {self.shard[1]}")

    @classmethod
    def of_ranks(cls, ranks: Ranks, config: QuantConfig, out: str | Path | None, *, own_format: bool) -> Team:
        """Return the team of ranks that quantize a model.

        Raises
        ------
        ConfigError
            Ranks do not support the settings. The message gives the setting and an alternative.
        """
        if out is None or not own_format:
            raise ConfigError(
                "several processes write a checkpoint of loopq's own format: `export` it afterwards"
            )
        refuse_rollouts(config, "several processes together", "start one, or take preset fast")
        check_out(Path(out))
        return cls(Path(out), ranks=ranks)

    def divide(
        self, plan: Plan, source: Source, combine: Callable[[Layers], Checkpoint]
    ) -> Checkpoint | None:
        """Take part in solving a plan.

        Parameters
        ----------
        plan, source
            As for one process. All processes have the same.
        combine : callable
            Takes all layers and writes the checkpoint. One process calls it.

        Returns
        -------
        Checkpoint or None
            The checkpoint in the output. None if layers of other shards are missing, or if another process writes it.

        Raises
        ------
        CheckpointError
            The output holds a checkpoint of other settings or another dump.
        """
        work = work_folder(self.out)
        try:
            if not is_written(self.out):
                data = source.divisible(plan, own_folder(work), self.ranks)
                ((tasks, hessians, metrics),) = data.parts(plan, plan.tasks)
                solver = data.solver(plan, hessians, metrics, data.journal(plan, "layers"))
                with solver.journal.claims() as claims:
                    if _share(solver, tasks, claims, self.shard, lambda: is_written(self.out)):
                        combine(solver.run(tasks))
        except (LoopqError, FileNotFoundError):
            # Other processes remove the work folder when they finish.
            if not is_written(self.out):
                raise
        if not is_written(self.out):
            return None
        checkpoint = read_any(self.out)
        settings = {"quantization": plan.config.to_json(), **source.facts()}
        if json_bytes({name: checkpoint.settings.get(name) for name in settings}) != json_bytes(settings):
            raise CheckpointError(
                f"{self.out}: holds a checkpoint of other settings or another dump; choose a new folder"
            )
        remove_own(work)
        return checkpoint


def _share(
    solver: Solver,
    tasks: Sequence[Task],
    claims: Claims,
    shard: tuple[int, int] | None,
    ended: Callable[[], bool],
) -> bool:
    """Solve unclaimed layers while there are any. Return whether all are solved and this process must combine them.

    Tasks with a common input are claimed together, largest first. A `shard` does not wait for others. `ended` tells
    whether another process has combined all layers. `solver.run` finds the layers in the journal.
    """
    journal = solver.journal
    groups = sorted(groups_of(tasks), key=solve_work, reverse=True)
    share = groups if shard is None else groups[shard[0] - 1 :: shard[1]]
    progress, reported = solver.execution.progress, 0
    progress.start("solve", len(tasks), "layers")
    last = False
    while not (last or ended()):
        busy = any(_claimed(solver, group, claims) for group in share)
        there = sum(journal.has(t.name) for t in tasks)
        progress.advance(there - reported)
        reported = there
        last = there == len(tasks) and claims.take("")
        if shard and not last and all(journal.has(t.name) for group in share for t in group):
            break
        if not (busy or last):
            time.sleep(POLL)
    progress.stop()
    return last


def _claimed(solver: Solver, group: Sequence[Task], claims: Claims) -> bool:
    """Claim and solve a group's layers. Return whether it had unclaimed, unsolved layers."""
    name = group[0].name
    if all(solver.journal.has(t.name) for t in group) or not claims.take(name):
        return False
    ours = True
    for layer, new in solver.each(group):
        ours = claims.holds(name)
        if not ours:
            break
        if new:
            save_layer(solver.journal, layer)
    claims.release(name, done=ours)
    return True
