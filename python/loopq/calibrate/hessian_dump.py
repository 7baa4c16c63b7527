"""Write exact sums to files, pass by pass, perhaps with loop metrics. A dump of Hessians holds those of all passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from loopq.calibrate.collect import alone, begin_dump, claim, finish_dump, write_manifest
from loopq.calibrate.dump import MANIFEST, DumpFile, Manifest, MetricFile, Rows, StoredSums
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.hessians import Hessians
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.sums_file import GradientSums, write_accumulator, write_gradient_sums
from loopq.errors import DumpError, naming
from loopq.settings.execution import at_most
from loopq.storage.files import free_bytes
from loopq.terminal.table import size


class Measured(NamedTuple):
    """A collected loop metric: its parameter, steps, sums, prompts and draws."""

    parameter: str
    steps: tuple[int, ...]
    sums: GradientSums
    n_prompts: int
    n_draws: int


class Gradients(Protocol):
    """Collector of loop metrics. Calibration itself runs no backward pass."""

    @property
    def counts(self) -> tuple[int, int]:
        """Number of prompts for gradients, and label draws for each of them. Both are zero without gradients."""

    def collect(
        self, hessians: Hessians, input_groups: Sequence[str], work: Path | None
    ) -> Iterator[Measured]:
        """Yield the metric of each parameter that reads these inputs. Resume from the folder `work`."""


@dataclass(frozen=True)
class HessianDump:
    """Exact sums that are collected pass by pass and written to files.

    Parameters
    ----------
    sums : HessianSet
        The sums of the current pass. They also hold the job.
    passes : list of list of str
        Input groups of each run over the calibration set.
    out : Path
        Folder of the files.
    work : Path or None
        Folder for unfinished work. With None nothing is saved, and nothing resumes.
    gradients : Gradients or None
        Collector of loop metrics.
    """

    sums: HessianSet
    passes: list[list[str]]
    out: Path
    work: Path | None
    gradients: Gradients | None

    @classmethod
    def of(
        cls,
        job: Collection,
        out: Path,
        *,
        steps: Sequence[int] | None = None,
        per_step: bool = False,
        gradients: Gradients | None = None,
    ) -> HessianDump:
        """Plan a dump. The parameters are those of `collect_hessians`."""
        wanted = {
            p.name: [t for t in (steps if steps is not None else range(p.invocations)) if t < p.invocations]
            for p in job.selection.distinct_inputs
        }
        sums = HessianSet(job, wanted, per_step=per_step)
        return cls(sums, sums.passes(), out, out / "work", gradients)

    @cached_property
    def key(self) -> str:
        """Identity of the work."""
        counts = self.gradients.counts if self.gradients else ()
        return self.sums.job.fingerprint(self.sums.steps, self.sums.per_step, *counts)

    def work_of(self, number: int) -> Path | None:
        """Return the folder for the saved sums of a pass."""
        return None if self.work is None else self.work / str(number)

    @property
    def is_there(self) -> bool:
        """Whether the dump is complete."""
        return (self.out / MANIFEST).exists()

    def begin(self) -> bool:
        """Claim the folder. Return whether it holds this finished dump, killed during its clean-up."""
        late = begin_dump(self.out, self.key, self.sums.job.inputs)
        claim(self.out, self.key, self.sums.job.inputs)
        return late

    def tell(self) -> None:
        """Report the memory and the passes of the collection."""
        needs = [list(map(self.sums.n_bytes, groups)) for groups in self.passes]
        held = max(map(sum, needs), default=0)
        # A sum takes twice its memory in addition while it is saved.
        most = max((sum(each) + 2 * max(each, default=0) for each in needs), default=0)
        self.sums.job.execution.progress.note(
            f"{at_most(most)}, {held / 2**20:.1f} of them for Hessians; passes over the text: {len(self.passes)}"
        )

    def parts(self) -> Iterator[StoredSums]:
        """Collect pass by pass. Yield the files of each pass; no sum is in memory then.

        Raises
        ------
        DumpError
            The disk is too small for the sums of a pass.
        """
        sums, out, job = self.sums, self.out, self.sums.job
        numbers, metric_numbers = itertools.count(), itertools.count()
        for number, input_groups in enumerate(self.passes):
            need, free = sum(map(sums.n_bytes, input_groups)), free_bytes(out)
            if need > free:
                raise DumpError(
                    f"{out}: the sums of a pass take {size(need)}, the disk has {size(free)}: free some space, or give "
                    "a lower --memory, so that a pass has fewer of them"
                )
            sums.run_pass(input_groups, work=self.work_of(number))
            files: list[DumpFile] = []
            rows: Rows = {}
            for input_group, index in zip(input_groups, numbers, strict=False):
                with naming(input_group):
                    files.append(self._write_sum(f"hessians/{index:03d}.safetensors", input_group))
                rows[input_group] = sums.rows(input_group)
                sums.drop(input_group)
            part = StoredSums(out, job.selection.parameters, files, (), rows, job.execution.threads)
            yield replace(part, metrics=list(self._metrics(part, self.work_of(number), metric_numbers)))

    def _write_sum(self, file: str, input_group: str) -> DumpFile:
        path = self.out / file
        digest = write_accumulator(path, self.sums.accumulators[input_group])
        return DumpFile(file, digest, path.stat().st_size, input_group, self.sums.per_step)

    def _metrics(self, part: StoredSums, work: Path | None, numbers: Iterator[int]) -> Iterator[MetricFile]:
        """Collect and write the loop metrics of a pass."""
        if self.gradients is None:
            return
        measured = self.gradients.collect(part, list(part.rows), work and work / "metric")
        for metric, index in zip(measured, numbers, strict=False):
            file = f"metrics/{index:03d}.safetensors"
            path = self.out / file
            digest = write_gradient_sums(path, metric.sums)
            yield MetricFile(
                file,
                digest,
                path.stat().st_size,
                metric.parameter,
                metric.steps,
                metric.n_prompts,
                metric.n_draws,
            )

    def write(self) -> Manifest:
        """Collect the missing sums, pass by pass, and write the dump."""
        files: list[DumpFile] = []
        metrics: list[MetricFile] = []
        rows: Rows = {}
        for part in self.parts():
            files += part.files
            metrics += part.metrics
            rows |= part.rows
        return write_manifest(self.sums.job, self.out, "hessian", "", rows, files, metrics)


def collect_hessians(
    job: Collection,
    out: Path,
    *,
    steps: Sequence[int] | None = None,
    per_step: bool = False,
    gradients: Gradients | None = None,
) -> Manifest:
    """Write a Hessian dump. An interrupted dump is resumed.

    Parameters
    ----------
    out : Path
        Folder of the dump. It must be new or hold the same unfinished dump.
    steps : sequence of int, optional
        Steps to keep. All invocations of each parameter are kept when absent.
    per_step : bool
        Keep each step separate, so that any choice of steps is possible later.
    gradients : Gradients, optional
        Collector of loop metrics. A dump with loop metrics cannot be merged, because gradients are weighted by the
        Hessian of all prompts.
    """
    dump = HessianDump.of(job, out, steps=steps, per_step=per_step, gradients=gradients)
    with alone(out):
        if dump.begin():
            return finish_dump(out)
        dump.tell()
        return dump.write()
