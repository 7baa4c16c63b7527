"""Work divided among processes: torchrun ranks for work on the model, claims on pieces for the rest.

Ranks wait for each other once, before they begin, and then share batches of the calibration set. Claims need no
meeting. Processes on any machines that see the same folder take unclaimed pieces. They also take over the pieces of
killed processes.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from loopq.calibrate.collect import collected, release
from loopq.calibrate.dump import Manifest
from loopq.calibrate.hessian_dump import Gradients, HessianDump
from loopq.calibrate.rollouts import Collection
from loopq.errors import CheckpointError, ConfigError, LoopqError
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_any
from loopq.lazy import require
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig
from loopq.run.dumped import Needs
from loopq.run.plan import Plan, solve_work
from loopq.run.result import assemble, output
from loopq.run.solver import Solver, groups_of, save_layer
from loopq.run.source import DumpSource, Layers, ModelSource, refuse_rollouts
from loopq.settings.execution import POLL, Execution
from loopq.storage.files import json_bytes, own_folder, remove_own
from loopq.storage.journal import Journal
from loopq.storage.lock import Claims, is_written, work_folder

#: Seconds that a process waits for the last messages of others.
PATIENCE = 10.0


@dataclass(frozen=True)
class Ranks:
    """One of the processes that torchrun started for one command.

    Parameters
    ----------
    rank, world : int
        Index of this process, from 0, and number of processes.
    timeout : float
        Maximum seconds of waiting for each other before the work begins.
    """

    rank: int
    world: int
    timeout: float = 600.0

    @classmethod
    def of_environment(cls) -> Ranks | None:
        """Read torchrun's variables; None for a single process.

        Raises
        ------
        ConfigError
            There are several processes, but this one has no rank.
        """
        world = os.environ.get("WORLD_SIZE", "1")
        if world == "1":
            return None
        rank = os.environ.get("RANK", "")
        if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
            raise ConfigError(
                f"WORLD_SIZE={world} and RANK={rank} are set: start the processes with torchrun, or unset both"
            )
        return cls(int(rank), int(world))

    def meet(self, work: str) -> None:
        """Wait until all processes have arrived with the same work.

        Raises
        ------
        LoopqError
            A process is late or has other work. The message says which.
        """
        missing, others = self._ask(work)
        if missing:
            raise LoopqError(
                f"rank {', '.join(map(str, missing))} of {self.world} did not come within {self.timeout:.0f} s; what "
                "is saved stays: start all again, in any number"
            )
        if others:
            raise LoopqError(
                f"rank {', '.join(map(str, others))} of {self.world} has other work than rank {self.rank}: the model, "
                "the prompts and the options must be the same everywhere"
            )

    def _ask(self, work: str) -> tuple[list[int], list[int]]:
        """Return missing ranks, and ranks with other work."""
        distributed, limit = require("torch.distributed", "torch"), timedelta(seconds=self.timeout)
        host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
        # torchrun keeps its own store, with entries of earlier attempts.
        own = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        place = f"loopq/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self.world}"
        missing, until = list(range(self.world)), time.monotonic() + self.timeout
        try:
            store = distributed.TCPStore(host, port, None, own, limit, wait_for_workers=False)
            store.set(f"{place}/{self.rank}", work)
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
                time.sleep(0.05)
            there = [rank for rank in range(self.world) if rank not in missing]
            others = [rank for rank in there if store.get(f"{place}/{rank}").decode() != work]
            # The process with the store stays until all others are done with it.
            store.add(f"{place}/through", 1)
            until = time.monotonic() + PATIENCE
            while own and store.add(f"{place}/through", 0) < len(there) and time.monotonic() < until:
                time.sleep(0.05)
        except RuntimeError as cause:
            # Torch raises this if nobody answers.
            raise LoopqError(
                f"rank {self.rank} of {self.world}: rank 0 at {host}:{port} did not come within {self.timeout:.0f} s, "
                "or is gone; what is saved stays: start all again, in any number"
            ) from cause
        return missing, others


def collect_hessians(
    ranks: Ranks,
    job: Collection,
    out: Path,
    *,
    steps: Sequence[int] | None = None,
    per_step: bool = False,
    gradients: Gradients | None = None,
) -> Manifest:
    """Write a Hessian dump as one of several ranks. The parameters are those of the function for one process.

    Raises
    ------
    LoopqError
        A rank is late or has other work, or a part failed. The message names the rank.
    """
    dump = HessianDump.of(job, out, steps=steps, per_step=per_step, gradients=gradients)
    late = ranks.rank == 0 and dump.begin()
    ranks.meet(dump.key)
    if late:
        found = dump.finish()
        release(out)
        return found
    dump.tell()
    try:
        (out / "work").mkdir(exist_ok=True)
        with Journal(out / "work", "").claims() as claims:
            for number, input_groups in enumerate(dump.passes):
                share = (ranks.rank, ranks.world)
                dump.sums.share_pass(input_groups, dump.work(number), share, lambda: dump.is_there)
            while not dump.is_there:
                if claims.take(""):
                    found = dump.write()
                    release(out)
                    return found
                time.sleep(POLL)
    except LoopqError as error:
        # The process that combines the dump removes the work folder.
        if not dump.is_there:
            raise type(error)(f"rank {ranks.rank} of {ranks.world}: {error}") from error
    # A slow process may have recreated it.
    shutil.rmtree(out / "work", ignore_errors=True)
    return Manifest.read(out)


def refuse(config: QuantConfig, out: str | Path | None, own_format: bool) -> Path:
    """Refuse settings that ranks do not support; return the folder for the checkpoint.

    Raises
    ------
    ConfigError
        The message gives the setting and an alternative.
    """
    if out is None or not own_format:
        raise ConfigError(
            "several processes write a checkpoint of loopq's own format: `export` it afterwards"
        )
    refuse_rollouts(config, "several processes together", "start one, or take preset fast")
    return Path(out)


def quantize(ranks: Ranks, plan: Plan, source: ModelSource, out: Path) -> Checkpoint:
    """Collect a dump as one of several ranks, then solve it as one of as many workers."""
    work = work_folder(out)
    dump = own_folder(work) / f"dump-{source.key(plan)[:16]}"
    try:
        if not collected(dump):
            needs = Needs.of(plan, source.job)
            collect_hessians(
                ranks, source.job, dump, steps=needs.steps, per_step=needs.per_step, gradients=needs.gradients
            )
        found = solve(dump, plan.config, source.execution, out)
    except (LoopqError, FileNotFoundError):
        # Faster ranks may have written `out` and removed the work folder with the dump.
        if dump.exists() or not is_written(out):
            raise
        remove_own(work)
        found = read_any(out)
    assert found is not None
    return found


def solve(
    dump: Path, config: QuantConfig, execution: Execution, out: Path, shard: tuple[int, int] | None = None
) -> Checkpoint | None:
    """Take part in solving a dump; see `loopq.solve`.

    Parameters
    ----------
    dump : Path
        Dump of rows or of Hessians.
    config, execution
        Settings, equal for all processes, and execution of this one.
    out : Path
        Folder for the checkpoint. All processes see it.
    shard : (int, int), optional
        K of N, from 1: solve the K-th of N parts of the layers without waiting for others.

    Returns
    -------
    Checkpoint or None
        The checkpoint in `out`. None if layers of other shards are missing, or if another process writes it.
    """
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise ConfigError(f"shard must be K of N, K from 1 to N; got {shard[0]} of {shard[1]}")
    work = work_folder(out)
    source = DumpSource.open(dump, dataclasses.replace(execution, work=work))
    plan = source.plan(config)
    solver = source.solver(plan, source.dump, source.metrics(plan.tasks), source.journal(plan, "layers"))
    settings = {"quantization": plan.config.to_json(), **source.facts()}
    try:
        if not is_written(out):
            own_folder(work)
            with solver.journal.claims() as claims:
                if _share(solver, plan.tasks, claims, shard, lambda: is_written(out)):
                    with output(out, execution) as (_, finish):
                        layers: Layers = solver.run(plan.tasks)
                        finish(assemble(plan, source, layers, {}))
    except LoopqError:
        # Other processes remove the work folder when they finish.
        if not is_written(out):
            raise
    if not is_written(out):
        return None
    found = read_any(out)
    if json_bytes({name: found.settings.get(name) for name in settings}) != json_bytes(settings):
        raise CheckpointError(
            f"{out}: holds a checkpoint of other settings or another dump; choose a new folder"
        )
    remove_own(work)
    return found


def _share(
    solver: Solver,
    tasks: Sequence[Task],
    claims: Claims,
    shard: tuple[int, int] | None,
    ended: Callable[[], bool],
) -> bool:
    """Solve unclaimed layers while there are any. `solver.run` finds them in the journal.

    Parameters
    ----------
    solver : Solver
        Solver of the layers.
    tasks : sequence of Task
        All tasks. Tasks with a common input are claimed together, largest first.
    claims : Claims
        Claims on pieces of the journal.
    shard : (int, int) or None
        K of N, from 1: take only every N-th piece, without waiting for others.
    ended : callable
        Whether another process has combined all layers.

    Returns
    -------
    bool
        Whether all layers are solved and this process must combine them.
    """
    journal = solver.journal
    groups = sorted(groups_of(tasks), key=solve_work, reverse=True)
    own = groups if shard is None else groups[shard[0] - 1 :: shard[1]]
    progress, told = solver.execution.progress, 0
    progress.start("solve", len(tasks), "layers")
    last = False
    while not (last or ended()):
        busy = any(_claimed(solver, group, claims) for group in own)
        there = sum(journal.has(t.name) for t in tasks)
        progress.advance(there - told)
        told = there
        last = there == len(tasks) and claims.take("")
        if shard and not last and all(journal.has(t.name) for group in own for t in group):
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
