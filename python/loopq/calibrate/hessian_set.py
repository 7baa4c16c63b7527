"""Hessians of a calibration set in memory, collected pass by pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import loopq._native as native
from loopq.calibrate.device import Sums
from loopq.calibrate.hessians import StepHessians
from loopq.calibrate.parts import Parts, Pass
from loopq.calibrate.rollouts import Collection, run_rollouts
from loopq.calibrate.select import pools
from loopq.errors import ConfigError
from loopq.settings.execution import POLL
from loopq.storage.journal import Journal, Snapshots
from loopq.terminal.progress import Progress, Silent


class HessianSet:
    """Hessian accumulators of every input group, in memory.

    Parameters
    ----------
    steps : mapping of str to list of int
        Summed steps of each input group.
    per_step : bool
        Keep each step's Hessian separate. This multiplies the memory by the number of steps.
    """

    def __init__(
        self, job: Collection, steps: Mapping[str, Sequence[int]], *, per_step: bool = False
    ) -> None:
        self.job = job
        self.per_step = per_step
        self.steps = {input_group: sorted(s) for input_group, s in steps.items()}
        self._dims = {p.name: p.in_features for p in job.selection.distinct_inputs}
        self.accumulators: dict[str, native.HessianAccumulator] = {}

    def n_bytes(self, input_group: str) -> int:
        """Memory of one accumulator: 16 bytes per entry of the upper triangle, and per step kept."""
        dim = self._dims[input_group]
        return 8 * dim * (dim + 1) * (len(self.steps[input_group]) if self.per_step else 1)

    def rows(self, input_group: str) -> dict[int, int]:
        """Rows added at each step."""
        acc = self.accumulators[input_group]
        return {step: acc.n_rows(step) for step in self.steps[input_group]}

    def accumulator(self, input_group: str, steps: Sequence[int], *, per_step: bool = False) -> StepHessians:
        """Return the accumulator of an input group. It must hold exactly these steps, or each step separately.

        `per_step` is for sources that sum on demand. It has no effect here.
        """
        acc = self.accumulators[input_group]
        if not self.per_step and list(steps) != self.steps[input_group]:
            raise ConfigError(
                f"layer {input_group}: summed over steps {self.steps[input_group]}, not {list(steps)}"
            )
        return acc

    def passes(self, need: Callable[[Sequence[str]], int] | None = None) -> list[list[str]]:
        """Divide the input groups into few passes within the memory limit: the largest first, each where it fits.

        `need` returns the bytes of a pass over some input groups; their accumulators' bytes when absent.

        Raises
        ------
        ConfigError
            One input group alone exceeds the limit, or those that stay together.
        """
        need = need or (lambda input_groups: sum(map(self.n_bytes, input_groups)))
        limit = self.job.execution.memory
        pool = pools(self.job.selection.parameters, self.job.selection.input_groups)
        units: dict[str, list[str]] = {}
        for input_group in self.steps:
            # Experts that share gradient sums stay together.
            units.setdefault(pool[input_group].name if input_group in pool else input_group, []).append(
                input_group
            )
        runs: list[list[str]] = []
        for unit in sorted(units.values(), key=need, reverse=True):
            if limit is not None and need(unit) > limit:
                raise ConfigError(
                    f"layer {unit[0]}: alone it takes {need(unit) / 2**20:.2f} MiB, above the limit of "
                    f"{limit / 2**20:.2f} MiB: raise --memory"
                )
            fits = (run for run in runs if limit is None or need([*run, *unit]) <= limit)
            fitting = next(fits, None)
            if fitting is None:
                runs.append(fitting := [])
            fitting += unit
        return [[g for g in self.steps if g in run] for run in runs]

    def run_pass(
        self, input_groups: Sequence[str], *, work: Path | None = None, label: str = "collect"
    ) -> None:
        """Collect the Hessians of some input groups in one run over the calibration set.

        Parameters
        ----------
        input_groups : sequence of str
            Input groups of this pass.
        work : Path, optional
            Folder for periodic snapshots of the sums. A pass resumes from snapshots of the same work.
        """
        parts = Parts(self._pass(input_groups), work)
        done = len(parts.saved.batches)
        if done:
            self.job.execution.progress.note(f"resumed: {done} of {self.job.n_batches} batches are there")
        if done < self.job.n_batches:
            self._run(parts, input_groups, label, self.job.execution.progress)
        self.accumulators.update(parts.finish())

    def share_pass(
        self, input_groups: Sequence[str], work: Path, share: tuple[int, int], ended: Callable[[], bool]
    ) -> None:
        """Run the unclaimed batches of a pass, until all its batches are saved in `work`.

        Parameters
        ----------
        input_groups, work
            As in `run_pass`, which adds up the saved parts afterwards.
        share : (int, int)
            Index of this process, from 0, and number of processes. Each process begins at another batch.
        ended : callable
            Whether other processes have finished the whole work and removed `work`.
        """
        first = self.job.n_batches * share[0] // share[1]
        with Journal(work, "").claims() as claims:
            parts = Parts(self._pass(input_groups), work, claims, ended)
            progress = self.job.execution.progress
            while len(parts.saved.batches) < self.job.n_batches and not ended():
                self._run(parts, input_groups, "collect", progress, first)
                time.sleep(POLL)
                parts.look()
                # From now on the process only waits for others, or takes over when one is gone.
                progress = Silent()

    def _pass(self, input_groups: Sequence[str]) -> Pass:
        return Pass(
            {g: self.steps[g] for g in input_groups},
            self.per_step,
            self.job.batch_tokens,
            self.job.system.device,
            self._empty,
            lambda: self.job.fingerprint("ranges", list(input_groups), self.steps, self.per_step),
        )

    def _run(
        self, parts: Parts, input_groups: Sequence[str], label: str, progress: Progress, first: int = 0
    ) -> None:
        """Run the wanted batches of a pass and save them periodically."""
        snapshots = Snapshots()
        for _ in run_rollouts(
            self.job,
            parts.add,
            only=input_groups,
            wanted=parts.begin,
            first=first,
            label=label,
            progress=progress,
        ):
            if snapshots.due():
                with snapshots.saving():
                    parts.save()
        # Other processes wait for shared parts, so these are always saved. Less than a minute of work is recomputed.
        if parts.shared or snapshots.due():
            parts.save()

    def _empty(self, input_group: str) -> Sums:
        """Return new sums of an input group."""
        return Sums(
            self._dims[input_group],
            self.steps[input_group],
            per_step=self.per_step,
            threads=self.job.execution.threads,
        )

    def drop(self, input_group: str) -> None:
        """Free one accumulator."""
        self.accumulators.pop(input_group, None)
